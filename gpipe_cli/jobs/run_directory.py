"""Writes a run's directory: its lock, and its record once nothing can refuse the run any more.

So a refused command changes no other run's directory. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.disk import DiskError, locked, open_for_writing, prepare_directory, write_whole, writing
from gpipe_cli.errors import NO_UTF8, ConfigurationError, refuses
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.launch.join import restart_count
from gpipe_cli.terminal.runs import ERROR_FILE
from gpipe_cli.terminal.text import relative_paths

if TYPE_CHECKING:
    pass

ENDING_SECONDS = 30.0  # for the children of a rank that torchrun restarts


# -- the directory itself ----------------------------------------------------------------------------------------------


@contextmanager
def sole_writer(run_dir: Path) -> Iterator[None]:
    """Holds the run directory's lock, which the system releases when this process ends."""
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


def require_writable(key: str, place: str | Path, is_file: bool = False) -> list[Path]:
    """Makes a folder in which files can be written; returns the folders above that were made for it, innermost first.

    Args:
        key: the key that names the folder, or a file in it.

    Raises:
        ConfigurationError: it has no name, it cannot be made, or nothing may be written there.
    """
    if not str(place):
        raise ConfigurationError(f"{key}= is empty: name a folder, or leave it out")
    if re.search(NO_UTF8, str(Path(str(place)).absolute())):
        raise ConfigurationError(f"{key}={place}: its path is not UTF-8, and checkpoints cannot be read there")
    if str(place).startswith("~"):
        raise ConfigurationError(f"{key}={place}: here ~ is no home folder, so type the whole path")
    path = Path(place).parent if is_file else Path(place)
    missing = [above for above in path.absolute().parents if not os.path.lexists(above)]
    try:
        prepare_directory(path)
    except DiskError as error:
        for above in missing:  # some of them may have been made
            with suppress(OSError):
                above.rmdir()
        raise ConfigurationError(f"{key}={place}: {error}: name a place that can be made and written") from error
    return missing


def where_it_is(folder: Path) -> str:
    """Returns the lines that name a run's or a sweep's directory and the command that opens it."""
    shown = relative_paths(str(folder))
    page = f"\nat one look: {shown}/report.html" if (folder / "report.html").is_file() else ""
    return f"run directory: {shown}{page}\nto look at it: tensorboard --logdir {shown}"


# -- what it says about the run ----------------------------------------------------------------------------------------


class RunRecord:
    """Writes `.hydra/` and `error.txt` of a run directory, whose lock is held inside the `with` block.

    An empty directory gets them at once, one that holds an earlier run when this one has begun.

    Args:
        composed: the configuration without Hydra's own node.
        keep: True if a new directory stays when its run is refused: a sweep's table reads it.
        above: empty folders around it that go with it.

    Attributes:
        is_open: True once the directory holds this run's record.
    """

    def __init__(self, run_dir: Path, composed: DictConfig, keep: bool, above: Sequence[Path] = ()) -> None:
        self.run_dir, self._keep, self._above = run_dir, keep, above
        self._is_new = not any(run_dir.iterdir())
        self._begun = self.is_open = False
        hydra = HydraConfig.instance().cfg
        task = HydraConfig.get().overrides.task
        self._logs = ("run.lock", f"{HydraConfig.get().job.name}.log")
        self._files: dict[str, Any] = {"config.yaml": composed, "hydra.yaml": hydra, "overrides.yaml": task}

    def __enter__(self) -> RunRecord:
        self._sizes = self._log_sizes()
        if self._is_new:
            self._write()
        return self

    def _log_sizes(self) -> dict[Path, int]:
        logs = (*map(self.run_dir.joinpath, self._logs), *self.run_dir.glob("workers/*.log"))
        return {path: path.stat().st_size for path in logs if path.is_file()}

    def begin(self) -> None:
        """Takes the place of an earlier run's record, because nothing can refuse this run any more."""
        self._begun = True
        if not self.is_open:
            self._write()

    def choose(self, keys: Mapping[str, Any]) -> None:
        """Records the keys that the planner chose, with their values, in ``.hydra/chosen.yaml``."""
        self._files["chosen.yaml"] = dict(keys)
        if self.is_open:
            self._write()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Writes the reason why the run failed; removes the record of a refused run that made the directory itself.

        What a refused run has logged in an earlier run's directory is removed.
        """
        if not self.is_open and refuses(error):
            for path in self._log_sizes():
                with suppress(OSError), os.fdopen(open_for_writing(path), "ab") as file:
                    file.truncate(self._sizes.get(path, 0))
                if path not in self._sizes:
                    path.unlink()
        if not self.is_open or not isinstance(error, Exception):
            return
        if self._is_new and not (self._begun or self._keep) and refuses(error):
            own = [*(self.run_dir / ".hydra" / name for name in self._files), *self._log_sizes()]
            there = {path for path in self.run_dir.rglob("*") if not path.is_dir() or path.is_symlink()}
            if there.issubset(own) and not Path.cwd().is_relative_to(self.run_dir):
                shutil.rmtree(self.run_dir, ignore_errors=True)
                for folder in self._above:
                    with suppress(OSError):  # others have put something there
                        folder.rmdir()
                self.is_open = False
                return
        with suppress(OSError):  # it may lie on the disk that is the cause
            write_whole(self.run_dir / ERROR_FILE, f"{error}\n")

    def _write(self) -> None:
        with writing(self.run_dir):
            folder = self.run_dir / ".hydra"
            folder.mkdir(exist_ok=True)
            for name, content in self._files.items():
                write_whole(folder / name, OmegaConf.to_yaml(content))
            (self.run_dir / ERROR_FILE).unlink(missing_ok=True)
        self.is_open = True
