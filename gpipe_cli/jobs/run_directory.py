"""Writes a run's directory: its lock, and its record once nothing can refuse the run any more.

So a refused command changes no other run's directory. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.disk import DiskError, locked, open_for_writing, write_whole, writing
from gpipe_cli.errors import ConfigurationError, refuses
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.launch.join import restart_count
from gpipe_cli.terminal.runs import ERROR_FILE
from gpipe_cli.terminal.text import relative_paths

FEW_BYTES = 16_384  # of small files that a run writes
ENDING_SECONDS = 30.0  # for the children of a rank that torchrun restarts


# -- the directory itself ----------------------------------------------------------------------------------------------


@contextmanager
def sole_writer(run_dir: Path) -> Iterator[None]:
    """Holds the run directory's lock within the context. The system releases it when this process ends.

    Raises:
        ConfigurationError: another process holds it.
    """
    if not is_first():
        yield
        return
    path, until = run_dir / "run.lock", time.monotonic() + (ENDING_SECONDS if restart_count() else 0.0)
    with writing(path):
        file = os.fdopen(open_for_writing(path))
    with file:
        while not locked(file.fileno()):
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"another gpipe-train is writing to {run_dir}: wait for it to end, or type another hydra.run.dir"
                )
            time.sleep(0.1)
        yield


def require_writable(key: str, place: str | Path, is_file: bool = False) -> None:
    """Makes a folder in which files can be written.

    Args:
        key: the key that names the folder, or a file in it.

    Raises:
        ConfigurationError: it has no name, it cannot be made, or nothing may be written there.
    """
    if not str(place):
        raise ConfigurationError(f"{key}= is empty: name a folder, or leave it out")
    if str(place).startswith("~"):
        raise ConfigurationError(f"{key}={place}: here ~ is no home folder, so type the whole path")
    path = Path(place).parent if is_file else Path(place)
    try:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path) as file:
                file.write(bytes(FEW_BYTES))
    except DiskError as error:
        raise ConfigurationError(f"{key}={place}: {error}: name a place that can be made and written") from error


def where_it_is(folder: Path) -> str:
    """Returns the lines that name a run's or a sweep's directory and the command that opens it."""
    shown = relative_paths(str(folder))
    page = f"\nat one look: {shown}/report.html" if (folder / "report.html").is_file() else ""
    return f"run directory: {shown}{page}\nto look at it: tensorboard --logdir {shown}"


# -- what it says about the run ----------------------------------------------------------------------------------------


class RunRecord:
    """Writes `.hydra/` and `error.txt` of a run directory. The caller holds its lock inside the `with` block.

    An empty directory gets `.hydra/` at once. One that holds an earlier run gets it when this run has begun.

    Args:
        composed: the configuration without Hydra's own node.
        keep: True if a new directory stays when its run is refused: a sweep's table reads it.

    Attributes:
        is_open: True once the directory holds this run's record.
    """

    def __init__(self, run_dir: Path, composed: DictConfig, keep: bool) -> None:
        self.run_dir, self._keep = run_dir, keep
        self._is_new = not any(run_dir.iterdir())
        self._begun = self.is_open = False
        place = HydraConfig.get()
        self._log = run_dir / f"{place.job.name}.log"
        hydra, task = HydraConfig.instance().cfg, place.overrides.task
        self._files: dict[str, Any] = {"config.yaml": composed, "hydra.yaml": hydra, "overrides.yaml": task}

    def __enter__(self) -> RunRecord:
        if self._is_new:
            self._write()
        return self

    def begin(self) -> None:
        """Replaces an earlier run's record. From here on nothing can refuse this run."""
        self._begun = True
        if not self.is_open:
            self._write()

    def choose(self, keys: Mapping[str, Any]) -> None:
        """Records the keys that the planner chose, with their values, in ``.hydra/chosen.yaml``."""
        self._files["chosen.yaml"] = dict(keys)
        if self.is_open:
            self._write()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Writes why the run failed, or removes what a refused run has put into a new directory."""
        if not self.is_open or not isinstance(error, Exception):
            return
        if self._is_new and not (self._begun or self._keep) and refuses(error):
            self._remove()
            return
        with suppress(OSError):  # it may lie on the disk that is the cause
            write_whole(self.run_dir / ERROR_FILE, f"{error}\n")

    def _remove(self) -> None:
        """Removes the files that this run has made, and folders that are then empty."""
        hydra, workers = self.run_dir / ".hydra", self.run_dir / "workers"
        for path in (self._log, self.run_dir / "run.lock", *map(hydra.joinpath, self._files), *workers.glob("*.log")):
            path.unlink(missing_ok=True)
        for folder in (hydra, workers, self.run_dir, self.run_dir.parent):
            if folder != Path.cwd():
                with suppress(OSError):  # others have put something there
                    folder.rmdir()
        self.is_open = False

    def _write(self) -> None:
        """Writes the files of `.hydra/`, and removes an earlier run's error.txt."""
        with writing(self.run_dir):
            folder = self.run_dir / ".hydra"
            folder.mkdir(exist_ok=True)
            for name, content in self._files.items():
                write_whole(folder / name, OmegaConf.to_yaml(content))
            (self.run_dir / ERROR_FILE).unlink(missing_ok=True)
        self.is_open = True
