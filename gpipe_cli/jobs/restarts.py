"""Decides whether a run starts again after the death of a worker. Imports no torch."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.checkpoint.files import latest, read_manifest, step_directories
from gpipe_cli.disk import write_whole
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.json_files import read_rows
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import Failure, WorkerFailed, take_failure

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console

RESTARTS = "restarts.jsonl"  # one line for each restart

log = logging.getLogger(__name__)


class Restarts:
    """Decides whether a run starts again after a failure, and from which checkpoint.

    A killed worker or a lost connection is worth a restart every time. After any other failure one restart is tried:
    if the same failure comes again before a new checkpoint is saved, it ends the run. What the run has found out itself
    (a wrong configuration, a loss that is not finite) ends it at once.

    Args:
        config: plain values, with the checkpoint to resume from.

    Attributes:
        settings: the configuration of the next start, plain values.
        records: one for each restart of the run so far, for summary.json.
    """

    def __init__(self, config: dict[str, Any], run_dir: Path, console: Console) -> None:
        self._allowed, self._first, self.settings = config["launch"]["restarts"], config, config
        self._count, self._last = 0, ("", -1)  # restarts of this command; cause and step of the last failure
        self._run_dir, self._console = run_dir, console
        goes_on = config["checkpoint"]["resume"] is not None or restart_count()
        self._found = _saved(run_dir)
        self.records = read_rows(run_dir / RESTARTS, dict[str, Any])[0] if goes_on else []
        if restart_count() and is_first():  # torchrun has started this process again
            failure = take_failure(run_dir / "workers")
            self._report(failure, f"torchrun's restart {restart_count()}", self._newest_checkpoint()[1])

    def prepare_next(self, failed: WorkerFailed) -> None:
        """Chooses the settings of the next start.

        Raises:
            WorkerFailed: this one: no restart is left, or none would help.
        """
        self._count += 1
        failure = failed.failure
        if failure is None or failure.is_plain or self._count > self._allowed:
            raise failed
        checkpoint, step = self._newest_checkpoint()
        before, self._last = self._last, (failure.cause, step)
        if not failure.from_outside and before == self._last:
            self._console.warn("no restart: this failure came twice, and no checkpoint was saved in between")
            raise failed
        log.info("%s", failure.text)
        self._report(failure, f"restart {self._count} of {self._allowed}", step)
        self.settings = {**self._first, "checkpoint": checkpoint}

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
