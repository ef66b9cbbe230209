"""Starts, watches and ends the workers of one job on this machine. Imports no torch.

    command (this module) ──starts──> zygote ──forks──> worker 0 … K-1
       ▲  one socket pair to each ──────┴──────────────────┘

The zygote leads a session and a process group of its own, so that Ctrl-C reaches the command alone and one `killpg`
reaches everything else, the workers' own children included. The kernel kills the workers when the zygote dies, and the
zygote kills its group when the command dies, so no death leaves orphans. A closed socket means that its process is
gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from gpipe_cli.cpu import GLOO_ON_ONE_MACHINE, compile_environment
from gpipe_cli.disk import writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch import report
from gpipe_cli.launch.context import Context, call_entry, leave_group
from gpipe_cli.launch.messenger import mailbox
from gpipe_cli.launch.report import STARTER, WorkerFailed
from gpipe_cli.launch.stop import StopSignals
from gpipe_cli.launch.zygote import STOP
from gpipe_cli.parent import child_command
from gpipe_cli.position import Position

TICK_SECONDS = 0.05
SETTLE_SECONDS = 0.2  # after a first failure: time for the other workers' reports
ECHO_SETTLE_SECONDS = 2.0  # … while all known failures are only consequences of another worker's end
LEAVE_SECONDS = 10.0  # for the last worker's exit handlers
STACKS_SECONDS = 0.3  # from SIGTERM, at which workers write their stacks to their logs, to SIGKILL
GONE_SECONDS = 5.0  # for the kernel to clear away killed processes
ZYGOTE = "import json; from gpipe_cli.launch.zygote import run_zygote; run_zygote(json.load(sys.stdin))"

log = logging.getLogger(__name__)
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """Describes a job: its workers, their entry point and its configuration.

    Attributes:
        run_dir: exists; logs go to its folder `workers/`.
        workers: processes on this machine, which is the world size.
        entry: "package.module:function", called in each worker as `function(context, config)`.
        config: plain JSON values.
        preload: modules that are imported once, before the workers are forked. They must not start threads or
            touch CUDA.
        threads: per worker, for torch and OpenMP.
        grace_seconds: time from the first request to stop until the workers are killed.
    """

    run_dir: Path
    workers: int
    entry: str
    config: dict[str, Any]
    preload: tuple[str, ...] = ()
    threads: int = 1
    grace_seconds: float = 28.0


def launch(job: Job, on_event: OnEvent) -> Any:
    """Runs the job to its end. None of its processes is left when this returns or raises, whatever happens.

    `on_event` gets the workers' events, `{"rank": r, **event}`, and the launcher's own: "stopping" (signal,
    grace_seconds) and "killed" (message).

    Returns:
        What the entry point returned on rank 0, a JSON value.

    Raises:
        WorkerFailed: a worker raised or died; the message is for the console.
        DiskError: what the workers need cannot be written.
        ConfigurationError: a worker refused the configuration.
        KeyboardInterrupt, SystemExit: the run was asked to stop by Ctrl-C, or by another signal (code 128 + number).
    """
    with StopSignals() as signals:
        workers = _Workers(job, on_event, signals)
        signals.handle(signal.SIGTSTP, workers.pause)
        try:
            failure = workers.until_end()
        finally:
            workers.end()
    if interruption := signals.interruption():
        if failure:
            log.error("%s", failure)
        raise interruption
    if failure:
        raise failure
    return workers.results[0]


def launch_inline(job: Job, on_event: OnEvent) -> Any:
    """Runs a job of one worker inside this process, so that a debugger, stdin and Ctrl-C just work.

    Exceptions of the entry point are not changed.

    Raises:
        ConfigurationError: the job has more than one worker.
    """
    if job.workers != 1:
        raise ConfigurationError(
            f"a job of {job.workers} workers cannot run inside the command's process: let one worker run all cells"
        )

    from torch.distributed import HashStore

    context = Context(
        rank=0,
        world_size=1,
        local_rank=0,
        run_dir=job.run_dir.absolute(),
        open_store=HashStore,
        emit=lambda event: on_event({"rank": 0, **event}),
        stop_requested=lambda: False,
    )
    try:
        return call_entry(resolve_name(job.entry), context, job.config, job.threads)
    finally:
        leave_group()


class _Workers:
    """Starts the processes of one launch, listens on a channel to each, and ends them.

    The zygote's channel has the key STARTER.

    Attributes:
        results: values that the entry point returned, by rank.
    """

    def __init__(self, job: Job, on_event: OnEvent, signals: StopSignals) -> None:
        self._job, self._on_event, self._signals = job, on_event, signals
        self._directory = job.run_dir.absolute() / "workers"
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
        self.results: dict[int, Any] = {}
        self._failures: dict[int, report.Failure] = {}  # by rank
        self._stop_deadline: float | None = None
        pairs = {rank: socket.socketpair() for rank in (STARTER, *range(job.workers))}
        with ExitStack() as handed_over:
            ends = {rank: handed_over.enter_context(theirs).fileno() for rank, (_, theirs) in pairs.items()}
            mailboxes = [[handed_over.enter_context(end).fileno() for end in mailbox()] for _ in range(job.workers)]
            store = os.memfd_create("gpipe-store")  # which no process of another user can open
            handed_over.callback(os.close, store)
            self._places = os.memfd_create("gpipe-places")
            os.ftruncate(self._places, job.workers * Position.SIZE)
            content = {**asdict(job), "run_dir": str(self._directory.parent), "directory": str(self._directory)}
            content |= {"control": ends[STARTER], "channels": [ends[rank] for rank in range(job.workers)]}
            content |= {"mailboxes": mailboxes, "places": self._places, "store": store}
            self._zygote = subprocess.Popen(
                child_command(ZYGOTE),
                stdin=subprocess.PIPE,
                env=_environment(job),
                pass_fds=[*ends.values(), *chain(*mailboxes), self._places, store],
                start_new_session=True,
            )
        assert self._zygote.stdin is not None
        # Not a file, which another user might change. Broken: the process has ended, which is reported below.
        with contextlib.suppress(BrokenPipeError), self._zygote.stdin as pipe:
            pipe.write(json.dumps(content).encode())
        self._open = {rank: ours for rank, (ours, _) in pairs.items()}
        self._rests = dict.fromkeys(self._open, b"")  # beginnings of lines that have not arrived whole
        self._selector = selectors.DefaultSelector()
        for rank, ours in self._open.items():
            self._selector.register(ours, selectors.EVENT_READ, rank)

    def until_end(self) -> WorkerFailed | ConfigurationError | None:
        """Watches until the job is over or has to be ended; returns its failure, None without."""
        while STARTER in self._open:
            self._listen(TICK_SECONDS)
            if self._failures:
                return self._settled_failure()
            if len(self.results) == self._job.workers:  # their exit codes no longer count
                deadline = time.monotonic() + LEAVE_SECONDS
                while STARTER in self._open and time.monotonic() < deadline:
                    self._listen(TICK_SECONDS)
                return None
            if self._must_stop_now():
                return None
        self._signal_all(signal.SIGKILL)  # the zygote could not start them, or was killed
        return self._silent_failure(STARTER, self._zygote.wait(GONE_SECONDS)).exception()

    def pause(self, *_: object) -> None:
        """Stops the workers with the command at Ctrl-Z, and continues them with it."""
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)

    def _listen(self, timeout: float) -> None:
        """Handles all messages that arrive within `timeout` seconds: events, results, failures and ends."""
        for rank, message in self._messages(timeout):
            if "event" in message:
                self._on_event({"rank": rank, **message["event"]})
            elif "finished" in message:
                self.results[rank] = message["finished"]
            elif "failed" in message:
                self._failures[rank] = report.received(self._directory, message["failed"])
            else:
                ended = message["rank"]
                if ended not in self.results and ended not in self._failures:
                    self._failures[ended] = self._silent_failure(ended, message["exit_code"])

    def _silent_failure(self, rank: int, exit_code: int) -> report.Failure:
        """Returns the failure of a process that ended without a report: by its exit code, its log and its place.

        In shared memory a worker keeps the place in its step (`Position`), which outlives it; the zygote has none.
        """
        written = b"" if rank == STARTER else os.pread(self._places, Position.SIZE, rank * Position.SIZE)
        return report.silent_failure(self._directory, rank, exit_code, Position(bytearray(written)).known())

    def _settled_failure(self) -> WorkerFailed | ConfigurationError:
        """Waits for the other workers' reports, and returns the failure that caused the others.

        It is the earliest of those that are least suspected to be an echo, a consequence of another worker's end.
        """
        start = time.monotonic()
        while STARTER in self._open:
            echoes = all(failure.suspicion for failure in self._failures.values())
            if time.monotonic() - start > (ECHO_SETTLE_SECONDS if echoes else SETTLE_SECONDS):
                break
            self._listen(TICK_SECONDS)
        return min(self._failures.values(), key=lambda failure: (failure.suspicion, failure.time)).exception()

    def _must_stop_now(self) -> bool:
        """Passes a first request to stop on to the workers.

        Returns True after a second request, or when the grace period is over.
        """
        if not self._signals.received:
            return False
        now = time.monotonic()
        if self._stop_deadline is None:
            self._stop_deadline = now + self._job.grace_seconds
            for rank in self._open.keys() - {STARTER}:
                with contextlib.suppress(OSError):  # the worker is gone
                    self._open[rank].send(STOP)
            name = self._signals.received[0].name
            self._on_event({"event": "stopping", "signal": name, "grace_seconds": self._job.grace_seconds})
        if now < self._stop_deadline and len(self._signals.received) == 1:
            return False
        stacks = f"their stacks are at the end of {self._directory}/rank_*.log"
        self._on_event({"event": "killed", "message": f"the workers were killed before they had stopped; {stacks}"})
        return True

    def _signal_all(self, number: signal.Signals) -> None:
        """Signals the zygote's process group, whose id is not reused before the zygote has been reaped."""
        if self._zygote.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._zygote.pid, number)

    def _messages(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """Returns (rank, message) of all that arrives within `timeout` seconds. Closed channels leave `_open`."""
        arrived = []
        for key, _ in self._selector.select(timeout):
            rank, received = key.data, b""
            with contextlib.suppress(OSError):
                received = self._open[rank].recv(2**20)
            if not received:
                self._close(rank)
                continue
            *lines, self._rests[rank] = (self._rests[rank] + received).split(b"\n")
            arrived += [(rank, json.loads(line)) for line in lines]
        # What a worker has sent before its end has arrived with the news of its end, and comes first.
        return sorted(arrived, key=lambda message: message[0] == STARTER)

    def _close(self, rank: int) -> None:
        channel = self._open.pop(rank)
        self._selector.unregister(channel)
        channel.close()

    def end(self) -> None:
        """Ends every process by SIGTERM, which writes stacks to the logs, then SIGKILL.

        After each it waits until every channel is closed.
        """
        for number, seconds in ((signal.SIGTERM, STACKS_SECONDS), (signal.SIGKILL, GONE_SECONDS)):
            self._signal_all(number)
            deadline = time.monotonic() + seconds
            while self._open and time.monotonic() < deadline:
                self._messages(TICK_SECONDS)
        for rank in list(self._open):
            self._close(rank)
        self._selector.close()
        os.close(self._places)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: nothing more can be done from here
            self._zygote.wait(GONE_SECONDS)


def _environment(job: Job) -> dict[str, str]:
    """Returns the workers' environment. The command's own stays, because the next job of a sweep would see changes."""
    threads = str(job.threads)
    return {
        **compile_environment(job.workers),
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",  # it starts its threads when numpy is imported, which would rule out the fork
        **GLOO_ON_ONE_MACHINE,
    }
