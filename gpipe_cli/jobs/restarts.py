"""Starts a run again from its newest checkpoint when a worker was lost (`launch.restarts`). Imports no torch."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.checkpoint.files import latest, read_manifest, step_directories
from gpipe_cli.disk import read_rows, write_whole
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import Failure, WorkerFailed, take_failure

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console

FILE = "restarts.jsonl"  # in the run directory: one line for each restart

log = logging.getLogger(__name__)


class Restarts:
    """Starts a run, and starts it again after a failure if that can help.

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
        self._failures: list[tuple[Failure, int]] = []  # each with the step of the newest checkpoint at that time
        if config["checkpoint"]["resume"] is None and is_first() and not restart_count():
            (run_dir / FILE).unlink(missing_ok=True)
        self._found = _saved(run_dir)
        self.records = read_rows(run_dir / FILE)[0]

    def run(self, start: Callable[[dict[str, Any]], Any]) -> Any:
        """Calls ``start`` with the settings of each start, and returns its result.

        Raises:
            WorkerFailed: of the last start: no restart is left, or none would help.
        """
        settings = self._first
        if restart_count() and is_first():  # torchrun has started this process again
            failure = take_failure(self._run_dir / "workers")
            self._report(failure, f"torchrun's restart {restart_count()}", self._newest_checkpoint()[1])
        while True:
            try:
                return start(settings)
            except WorkerFailed as failed:
                failure, done = failed.failure, len(self._failures)
                if failure is None or failure.is_plain or done >= self._allowed:
                    raise
                checkpoint, step = self._newest_checkpoint()
                if not failure.from_outside and (failure.cause, step) in [(f.cause, at) for f, at in self._failures]:
                    self._console.warn("no restart: this failure came twice, and no checkpoint was saved in between")
                    raise
                self._failures.append((failure, step))
                log.info("%s", failure.text)
                self._report(failure, f"restart {done + 1} of {self._allowed}", step)
                settings = {**self._first, "checkpoint": checkpoint}

    def _newest_checkpoint(self) -> tuple[dict[str, Any], int]:
        """Returns the section `checkpoint` with which the run starts again, and the step from which it continues.

        A checkpoint that was there before does not count: the run may have been told to continue from an older one.
        """
        section: dict[str, Any] = self._first["checkpoint"]
        new = _saved(self._run_dir) - self._found
        newest = latest(self._run_dir)[0] if new else None
        if newest is not None and newest.path in {path for path, _ in new}:
            weights: dict[str, Any] = {"resume": str(newest.path.absolute()), "init_from": None, "init_except": []}
            return {**section, **weights}, newest.step
        return section, 0 if section["resume"] is None else read_manifest(Path(section["resume"])).step

    def _report(self, failure: Failure | None, count: str, step: int) -> None:
        """Prints and records one restart, for summary.json and in a file for the case that the run is resumed."""
        cause, place = ("a process was killed", None) if failure is None else (failure.cause, failure.place or None)
        self._console.warn(f"{cause}: {count} from step {step}")
        self.records.append({"time": time.time(), "cause": cause, "place": place, "from_step": step})
        with suppress(OSError):
            write_whole(self._run_dir / FILE, "".join(f"{json.dumps(record)}\n" for record in self.records))


def _saved(run_dir: Path) -> set[tuple[Path, int]]:
    """Returns path and time of the run's checkpoints; their files are not read."""
    manifests = [directory / "manifest.json" for directory in step_directories(run_dir)]
    return {(path.parent, path.stat().st_mtime_ns) for path in manifests if path.is_file()}
