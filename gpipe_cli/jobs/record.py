"""Opens the record of a run once nothing can refuse it any more, so that a refused command changes no other run's."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.checkpoint.files import locked
from gpipe_cli.disk import DISK, DiskError, prepare_directory, write_whole, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.terminal.runs import ERROR_FILE
from gpipe_cli.terminal.text import relative_paths

ENDING_SECONDS = 30.0  # for the children of a rank that torchrun restarts


class RunRecord:
    """Writes `.hydra/` and `error.txt` of a run directory, whose lock is held inside the `with` block.

    An empty directory gets them at once, one that holds an earlier run when this one has begun.

    Args:
        composed: the configuration without Hydra's own node.
        keep: whether a new directory stays when its run is refused: a sweep's table reads it.

    Attributes:
        is_open: whether the directory holds this run's record.
    """

    def __init__(self, run_dir: Path, composed: DictConfig, keep: bool) -> None:
        self._run_dir, self._composed, self._keep = run_dir, composed, keep
        self._is_new = not any(run_dir.iterdir())
        self._begun = self.is_open = False
        self._chosen: dict[str, Any] = {}

    def __enter__(self) -> RunRecord:
        if self._is_new:
            self._open()
        return self

    def begin(self) -> None:
        """Takes the place of an earlier run's record, because nothing can refuse this run any more."""
        self._begun = True
        if not self.is_open:
            self._open()

    def choose(self, keys: Mapping[str, Any]) -> None:
        """Records the keys that the planner chose, with their values, in ``.hydra/chosen.yaml``."""
        self._chosen = dict(keys)
        if self.is_open:
            self._write("chosen.yaml", OmegaConf.create(self._chosen))

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        """Leaves the reason why the run failed; of a refused run that was to have a directory of its own, nothing."""
        if not self.is_open or not isinstance(error, (ConfigurationError, WorkerFailed, DiskError)):
            return
        useless = self._is_new and not (self._begun or self._keep) and isinstance(error, ConfigurationError)
        if useless and not Path.cwd().is_relative_to(self._run_dir):
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self.is_open = False
            return
        with suppress(OSError):  # it may lie on the disk that is the cause
            (self._run_dir / ERROR_FILE).write_text(f"{error}\n", encoding="utf-8")

    def _open(self) -> None:
        folder, hydra = self._run_dir / ".hydra", HydraConfig.instance().cfg
        parts = {
            "config.yaml": self._composed,
            "hydra.yaml": hydra,
            "overrides.yaml": HydraConfig.get().overrides.task,
        }
        if self._chosen:
            parts["chosen.yaml"] = OmegaConf.create(self._chosen)
        with writing(folder):
            folder.mkdir(exist_ok=True)
        for name, part in parts.items():
            self._write(name, part)
        with writing(error := self._run_dir / ERROR_FILE):
            error.unlink(missing_ok=True)
        self.is_open = True

    def _write(self, name: str, part: Any) -> None:
        file = self._run_dir / ".hydra" / name
        with writing(file):
            write_whole(file, OmegaConf.to_yaml(part))


@contextmanager
def sole_writer(run_dir: Path) -> Iterator[None]:
    """Holds the run directory's lock, which the system releases when this process ends."""
    if not torchrun.is_first():
        yield
        return
    path, until = run_dir / "run.lock", time.monotonic() + (ENDING_SECONDS if restart_count() else 0.0)
    with writing(path):
        file = path.open("a")
    with file:
        while not locked(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"another gpipe-train is writing to {run_dir}: wait for it to end, or type another hydra.run.dir"
                )
            time.sleep(0.1)
        yield


def require_writable(key: str, folder: str | Path) -> None:
    """Makes a folder in which files can be written.

    Args:
        key: that names the folder.

    Raises:
        ConfigurationError: it has no name, it cannot be made, or nothing may be written there.
        DiskError: its disk is full or fails.
    """
    if not str(folder):
        raise ConfigurationError(f"{key}= is empty: name a folder, or leave it out")
    try:
        prepare_directory(Path(str(folder)).expanduser())
    except (DiskError, ValueError, RuntimeError) as error:  # a NUL character; a home that is not known
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK:
            raise
        raise ConfigurationError(f"{key}={folder}: {error}: name a folder that can be made and written") from error


def where_it_is(folder: Path) -> str:
    """Returns the lines that name a run's or a sweep's directory and the command that opens it."""
    shown = relative_paths(str(folder))
    page = f"\nat one look: {shown}/report.html" if (folder / "report.html").is_file() else ""
    return f"run directory: {shown}{page}\nto look at it: tensorboard --logdir {shown}"
