"""Writes a run's directory: its lock, its record once nothing can refuse the run any more, and its restarts.

So a refused command changes no other run's directory. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.checkpoint.files import latest, read_manifest, step_directories
from gpipe_cli.disk import DiskError, locked, open_for_writing, prepare_directory, write_whole, writing
from gpipe_cli.errors import NO_UTF8, ConfigurationError, refuses
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.json_files import read_rows
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import Failure, WorkerFailed, take_failure
from gpipe_cli.terminal.runs import ERROR_FILE
from gpipe_cli.terminal.text import relative_paths

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console

ENDING_SECONDS = 30.0  # for the children of a rank that torchrun restarts
RESTARTS = "restarts.jsonl"  # one line for each restart

log = logging.getLogger(__name__)


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


made_for_run: list[Path] = []  # folders above a run's directory that were made for it, the innermost first


def require_writable(key: str, place: str | Path, is_file: bool = False) -> None:
    """Makes a folder in which files can be written.

    Args:
        key: that names the folder, or a file in it.

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
    made_for_run[:] = [above for above in path.absolute().parents if not os.path.lexists(above)]
    try:
        prepare_directory(path)
    except DiskError as error:
        for above in made_for_run:
            with suppress(OSError):
                above.rmdir()
        raise ConfigurationError(f"{key}={place}: {error}: name a place that can be made and written") from error


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
        keep: whether a new directory stays when its run is refused: a sweep's table reads it.

    Attributes:
        is_open: whether the directory holds this run's record.
    """

    def __init__(self, run_dir: Path, composed: DictConfig, keep: bool) -> None:
        self._run_dir, self._keep = run_dir, keep
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
        logs = (*map(self._run_dir.joinpath, self._logs), *self._run_dir.glob("workers/*.log"))
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
            own = [*(self._run_dir / ".hydra" / name for name in self._files), *map(self._run_dir.joinpath, self._logs)]
            there = {path for path in self._run_dir.rglob("*") if not path.is_dir() or path.is_symlink()}
            if there.issubset(own) and not Path.cwd().is_relative_to(self._run_dir):
                for path in there:
                    path.unlink()
                for folder in (self._run_dir / ".hydra", self._run_dir, *made_for_run):
                    with suppress(OSError):  # others have put something there
                        folder.rmdir()
                self.is_open = False
                return
        with suppress(OSError):  # it may lie on the disk that is the cause
            write_whole(self._run_dir / ERROR_FILE, f"{error}\n")

    def _write(self) -> None:
        with writing(self._run_dir):
            folder = self._run_dir / ".hydra"
            folder.mkdir(exist_ok=True)
            for name, content in self._files.items():
                write_whole(folder / name, OmegaConf.to_yaml(content))
            (self._run_dir / ERROR_FILE).unlink(missing_ok=True)
        self.is_open = True


# -- restarts ----------------------------------------------------------------------------------------------------------


class Restarts:
    """Starts a run, and starts it again from its newest checkpoint after a failure if that can help.

    A killed worker or a lost connection is worth a restart every time. After any other failure one restart is tried:
    if the same failure comes again before a new checkpoint is saved, it ends the run. What the run has found out itself
    (a wrong configuration, a loss that is not finite) ends it at once.

    Args:
        config: plain values, with the checkpoint to resume from.

    Attributes:
        records: of all restarts of the run so far, for summary.json.
    """

    def __init__(self, config: dict[str, Any], run_dir: Path, console: Console) -> None:
        self._allowed, self._first = config["launch"]["restarts"], config
        self._run_dir, self._console = run_dir, console
        goes_on = config["checkpoint"]["resume"] is not None or restart_count()
        self._found = _saved(run_dir)
        self.records = read_rows(run_dir / RESTARTS, dict[str, Any])[0] if goes_on else []

    def run(self, start: Callable[[dict[str, Any]], Any]) -> Any:
        """Calls ``start`` with the settings of each start, and returns its result.

        Raises:
            WorkerFailed: of the last start: no restart is left, or none would help.
        """
        settings, count, last = self._first, 0, None
        if restart_count() and is_first():  # torchrun has started this process again
            failure = take_failure(self._run_dir / "workers")
            self._report(failure, f"torchrun's restart {restart_count()}", self._newest_checkpoint()[1])
        while True:
            try:
                return start(settings)
            except WorkerFailed as failed:
                failure, count = failed.failure, count + 1
                if failure is None or failure.is_plain or count > self._allowed:
                    raise
                checkpoint, step = self._newest_checkpoint()
                before, last = last, (failure.cause, step)
                if not failure.from_outside and before == last:
                    self._console.warn("no restart: this failure came twice, and no checkpoint was saved in between")
                    raise
                log.info("%s", failure.text)
                self._report(failure, f"restart {count} of {self._allowed}", step)
                settings = {**self._first, "checkpoint": checkpoint}

    def _newest_checkpoint(self) -> tuple[dict[str, Any], int]:
        """Returns the section `checkpoint` with which the run starts again, and the step from which it continues.

        A checkpoint that was there before does not count: the run may have been told to continue from an older one.
        """
        section: dict[str, Any] = self._first["checkpoint"]
        new = {path for path, _ in _saved(self._run_dir) - self._found}
        newest = latest(self._run_dir)[0] if new else None
        if newest is not None and newest.path in new:
            weights: dict[str, Any] = {"resume": str(newest.path.absolute()), "init_from": None, "init_except": []}
            return {**section, **weights}, newest.step
        return section, 0 if section["resume"] is None else read_manifest(Path(section["resume"])).step

    def _report(self, failure: Failure | None, count: str, step: int) -> None:
        """Prints and records one restart, for summary.json and in a file for the case that the run is resumed."""
        cause, place = ("a process was killed", None) if failure is None else (failure.cause, failure.place or None)
        self._console.warn(f"{cause}: {count} from step {step}")
        self.records.append({"time": time.time(), "cause": cause, "place": place, "from_step": step})
        with suppress(OSError):
            write_whole(self._run_dir / RESTARTS, "".join(f"{json.dumps(record)}\n" for record in self.records))


def _saved(run_dir: Path) -> set[tuple[Path, int]]:
    """Returns path and time of the run's checkpoints; their files are not read."""
    manifests = [directory / "manifest.json" for directory in step_directories(run_dir)]
    return {(path.parent, path.stat().st_mtime_ns) for path in manifests if path.is_file()}
