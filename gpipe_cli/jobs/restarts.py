"""Starts a run again from its newest checkpoint when a worker was lost (`launch.restarts`). Imports no torch."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gpipe_cli.checkpoint import choose as checkpoints
from gpipe_cli.checkpoint.files import read_manifest, step_directories
from gpipe_cli.config import Settings
from gpipe_cli.disk import read_rows, skipped, write_whole
from gpipe_cli.gpus import hide_gpu
from gpipe_cli.jobs.torchrun import is_first
from gpipe_cli.jobs.workers import find_devices, plural, room_for_workers
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import STARTER, Failure, WorkerFailed, take_failure

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console

FILE = "restarts.jsonl"  # in the run directory: one line for each restart
GIVE_UP_AFTER = 3  # deaths of one worker in a row without a new checkpoint between them

Stamp: TypeAlias = "tuple[Path, int]"

log = logging.getLogger(__name__)


class Restarts:
    """Starts a run, and starts it again after a failure if that can help, on the workers that are left.

    A killed worker or a lost connection is worth a restart every time. After any other failure one restart is tried:
    if the same failure comes again before a new checkpoint is saved, it ends the run. What the run has found out itself
    (a wrong configuration, a loss that is not finite) ends it at once.

    Args:
        settings: with the number of workers in place of "auto".
        config: the same as plain values, with the checkpoint to resume from.

    Attributes:
        records: of all restarts of the run so far, for summary.json.
    """

    def __init__(self, settings: Settings, config: dict[str, Any], run_dir: Path, console: Console) -> None:
        self._pipeline, self._allowed, self._first = settings.pipeline, settings.launch.restarts, config
        self._run_dir, self._console = run_dir, console
        self._room = room_for_workers(self._pipeline)[0] if self._allowed else 0
        self._given_up = self._done = 0
        self._failures: list[tuple[Failure, int]] = []  # each with the step of the newest checkpoint at that time
        if config["checkpoint"]["resume"] is None and is_first() and not restart_count():
            (run_dir / FILE).unlink(missing_ok=True)
        self._found = _stamps(run_dir) if self._allowed else frozenset()
        self.records, damaged = read_rows(run_dir / FILE)
        if damaged:
            console.warn(skipped(run_dir / FILE, damaged))

    def run(self, start: Callable[[dict[str, Any]], Any]) -> Any:
        """Calls ``start`` with the settings of each start, and returns its result.

        Raises:
            WorkerFailed: of the last start: no restart is left, or none would help.
        """
        settings = self._first
        if restart_count() and is_first():
            self._report_torchruns()
        while True:
            try:
                return start(settings)
            except WorkerFailed as failed:
                if failed.failure is None or failed.failure.is_plain or self._done >= self._allowed:
                    raise
                checkpoint, step = self._newest_checkpoint()
                if self._is_repeated(failed.failure, step):
                    self._console.warn("no restart: this failure came twice, and no checkpoint was saved in between")
                    raise
                workers = self._after(failed.failure, step)
                pipeline = {**self._first["pipeline"], "workers": workers}
                settings = {**self._first, "checkpoint": checkpoint, "pipeline": pipeline}

    def _newest_checkpoint(self) -> tuple[dict[str, Any], int]:
        """Returns the section `checkpoint` with which the run starts again, and the step from which it continues.

        A checkpoint that was there before does not count: the run may have been told to continue from an older one.
        """
        section: dict[str, Any] = self._first["checkpoint"]
        saved = _stamps(self._run_dir) - self._found
        newest = checkpoints.latest(self._run_dir).checkpoint if saved else None
        if newest is not None and _stamp(newest.path) in saved:
            return {**section, "resume": str(newest.path.absolute()), "init_from": None}, newest.step
        return section, 0 if section["resume"] is None else read_manifest(Path(section["resume"])).step

    def _is_repeated(self, failure: Failure, step: int) -> bool:
        return not failure.from_outside and any((failure.cause, step) == (f.cause, at) for f, at in self._failures)

    def _after(self, failure: Failure, step: int) -> int:
        """Records and reports a restart from ``step``; returns the number of workers of one replica."""
        self._failures.append((failure, step))
        self._done += 1
        workers = self._workers_left()
        log.info("%s", failure.text)
        self._record(failure.cause, failure.place, step, workers)
        where = f"restart {self._done} of {self._allowed} from step {step} on {plural(workers, 'worker')}"
        self._console.warn(f"{failure.cause}: {where}")
        return workers

    def _report_torchruns(self) -> None:
        """Records and reports a restart by torchrun, which has started this process."""
        failure = take_failure(self._run_dir / "workers")
        cause, place = ("a process of torchrun's was killed", "") if failure is None else (failure.cause, failure.place)
        _, step = self._newest_checkpoint()
        workers = self._pipeline.worker_count
        self._record(cause, place, step, workers)
        where = f"torchrun's restart {restart_count()} from step {step} on {plural(workers, 'worker')}"
        self._console.warn(f"{cause}: {where}")

    def _record(self, cause: str, place: str, step: int, workers: int) -> None:
        """Records one restart for summary.json, and in a file for the case that the run is resumed."""
        self.records.append(
            {"time": time.time(), "cause": cause, "place": place or None, "from_step": step, "workers": workers}
        )
        try:
            write_whole(self._run_dir / FILE, "".join(f"{json.dumps(record)}\n" for record in self.records))
        except OSError as error:
            self._console.warn(f"{self._run_dir / FILE} cannot be written ({error}): the restart is not recorded there")

    def _workers_left(self) -> int:
        """Returns the number of workers of one replica: as at first, less what the machine or the run has lost."""
        last = self._failures[-GIVE_UP_AFTER:]
        rank = last[0][0].rank
        same = {(failure.rank, step) for failure, step in last} == {(rank, last[0][1])}
        if len(last) == GIVE_UP_AFTER and same and rank != STARTER:
            self._failures.clear()
            self._give_up(rank)
        pipeline, room = self._pipeline, room_for_workers(self._pipeline)[0]
        most = max(1, pipeline.worker_count - self._given_up)
        return replace(pipeline, workers="auto").workers_in(min(most, room) if room < self._room else most)

    def _give_up(self, rank: int) -> None:
        """Hides the GPU of a worker that dies again and again; where it is the only one, uses one worker fewer."""
        devices = find_devices(self._pipeline.device)
        if devices.word == "GPU" and devices.number > 1:
            hide_gpu(rank % devices.number)
            loss = "its GPU is not used any more"
        else:
            self._given_up += 1
            loss = "one worker fewer is used"
        self._console.warn(f"worker {rank} died {GIVE_UP_AFTER} times without a new checkpoint: {loss}")


def _stamps(run_dir: Path) -> frozenset[Stamp]:
    """Returns what tells the run's checkpoints from others that may replace them; their files are not read."""
    stamps = set()
    for directory in step_directories(run_dir):
        with suppress(OSError):  # without a manifest
            stamps.add(_stamp(directory))
    return frozenset(stamps)


def _stamp(checkpoint: Path) -> Stamp:
    """Returns a checkpoint's path and the time of its manifest, in nanoseconds."""
    return checkpoint, (checkpoint / "manifest.json").stat().st_mtime_ns
