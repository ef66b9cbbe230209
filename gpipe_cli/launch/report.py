"""Reports failures: each worker sends its own, and the command finds the one that caused the others."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpipe_cli import disk
from gpipe_cli.errors import ConfigurationError, PlainError

LOG_LINES_SHOWN = 15
LOG_COLUMNS_SHOWN = 200
LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # of a worker's log
STARTER = -1  # in place of a rank: the process that starts the workers

# Errors of torch.distributed, gloo and NCCL when the other side is gone or slow.
COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|process ?group|TCPStore|Connection (closed|reset) by peer|Broken pipe", re.IGNORECASE
)
# NCCL raises the same errors where it fails itself (no room in /dev/shm); with these words another side has ended.
_OF_PEER = re.compile(r"remote|peer|closed|reset|refused|broken pipe|timed? ?out|abort", re.IGNORECASE)
# Errors of torch and its libraries when a device or the machine has no memory for a tensor.
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED|MemoryError", re.IGNORECASE)
ADVICE: dict[str | re.Pattern[str], str] = {  # on errors whose own words do not help; the last part of what is printed
    NO_MEMORY: "pipeline.remat=always, lower pipeline.keep, higher pipeline.M or precision=bf16 need less memory; "
    "gpipe-plan with the same words and plan.fit=24GB (what a device has) finds what fits",
    "device-side assert": "a GPU reports a wrong index late, at another layer: is a token or label beyond a table? "
    "The same words with pipeline.device=cpu name the layer",
    "deterministic implementation": "precision.deterministic=false runs it; its last bits vary",
    "Resource temporarily unavailable": "this machine or account allows no more threads or memory (ulimit -a)",
    "Expected more than 1 value per channel": "BatchNorm needs several examples in each micro-batch: lower "
    "pipeline.M or raise data.batch_size",
    "/dev/shm/nccl": "NCCL needs more shared memory than this container has: docker run --shm-size=8g",
}
# torch's words for a loader process that finds no room for a batch in the memory it shares with the worker.
LOADER = re.compile(r"shared memory\(shm\)|</torch_\w+>|DataLoader worker .*(Bus error|shared memory)")
NO_ROOM_FOR_LOADERS = (
    "the loader processes of data.workers need more shared memory than /dev/shm has: start the container with more "
    "(docker run --shm-size=8g), or type data.workers=0"
)
SIGNAL_NAMES = {int(number): number.name for number in signal.Signals}
OF_SIGKILL = " (usually the kernel's out-of-memory killer: see `dmesg`, and use less memory per worker)"
ENDING_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # sent from outside


class WorkerFailed(RuntimeError):
    """Raised when a worker failed; the message names it, its place and the cause, and ends with the path of its log.

    Its only argument is the message, so that it can be pickled (joblib and submitit sweeps do).

    Attributes:
        failure: description of the worker's end; None where nothing more than the message is known.
    """

    failure: Failure | None = None


@dataclass(frozen=True)
class Failure:
    """Describes one worker's end, as far as it is known; the fields are JSON values.

    Attributes:
        rank: STARTER for the process that starts the workers.
        suspicion: likelihood of an echo of another worker's end: 0 none, 1 possible, 2 certain.
        time: seconds since the epoch.
        text: the report for the console.
        is_configuration: the worker refused the configuration.
        cause: one line: the worker's name, and the signal, exit code or exception.
        place: work that the worker was doing, in words; empty if unknown.
        is_plain: the text explains everything: what ran found the failure itself.
        from_outside: the worker was killed, or lost its connection to another one.
    """

    rank: int
    suspicion: int
    time: float
    text: str
    cause: str = ""
    place: str = ""
    is_plain: bool = False
    is_configuration: bool = False
    from_outside: bool = False

    def exception(self) -> WorkerFailed | ConfigurationError:
        """Returns the exception that ends the command."""
        if self.is_configuration:
            return ConfigurationError(self.text)
        failed = WorkerFailed(self.text)
        failed.failure = self
        return failed


def log_path(directory: Path, rank: int) -> Path:
    return directory / ("starter.log" if rank == STARTER else f"rank_{rank}.log")


def failure_of(rank: int, error: BaseException, where: dict[str, Any]) -> Failure:
    """Describes the failure of this process by an exception; `where` is its place, as `Position.known` returns it."""
    plain, echo = str(error) if isinstance(error, PlainError) else disk.explain(error), suspicion(error)
    said = "\n".join(f"{type(link).__name__}: {link}" for link in _chain(error))
    plain = NO_ROOM_FOR_LOADERS if LOADER.search(said) else plain
    advice = next((f"\n{advice}" for words, advice in ADVICE.items() if re.search(words, said)), "")
    shown = "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        rank=rank,
        suspicion=echo,
        time=time.time(),
        text=f"{_name(rank)} failed{_place(where)}:\n{shown}{advice}" if plain is None else plain + advice,
        cause=f"{_name(rank)} failed: " + f"{type(error).__name__}: {error}".splitlines()[0],
        place=describe_place(where),
        is_plain=plain is not None,
        is_configuration=isinstance(error, ConfigurationError),
        from_outside=echo == 2,
    )


def in_short(failure: Failure) -> str:
    """Returns what a rank prints that a launcher started: one line if another rank is the cause, else all."""
    if failure.suspicion < 2:
        return failure.text
    where = f" at {failure.place}" if failure.place else ""
    return f"{failure.cause}{where}; the worker that failed first prints the cause"


def suspicion(error: BaseException) -> int:
    """Returns how likely an error is only an echo of another worker's end: 0 none, 1 possible, 2 certain.

    None, some or all of the exceptions in its chain are communication errors. It is 1 at most if NCCL's words name no
    other side.
    """
    links = [_is_of_communication(link) for link in _chain(error)]
    own = any("NCCL error" in str(link) and not _OF_PEER.search(str(link)) for link in _chain(error))
    return 2 if all(links) and not own else 1 if any(links) else 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and those that caused it, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_of_communication(error: BaseException) -> bool:
    """Returns whether an error is one of torch's `DistError`s, or a RuntimeError with words of `COMMUNICATION`."""
    is_torchs = any(base.__name__ == "DistError" for base in type(error).__mro__)
    return is_torchs or (isinstance(error, RuntimeError) and COMMUNICATION.search(str(error)) is not None)


def received(directory: Path, report: dict[str, Any]) -> Failure:
    """Returns the failure that a worker has sent as JSON, with the path of its log."""
    failure = Failure(**report)
    log = "" if failure.is_plain else f"\nlog: {log_path(directory, failure.rank)}"
    return replace(failure, text=failure.text + log)


def silent_failure(directory: Path, rank: int, exit_code: int, where: dict[str, Any]) -> Failure:
    """Describes the end of a worker that has sent no report.

    Args:
        exit_code: minus the signal's number for a process killed by a signal, as in `subprocess`.
        where: the last known place of the worker.
    """
    log = log_path(directory, rank)
    tail = "\n".join(_last_lines(log))
    how = f"ended with exit code {exit_code} and left no error report"
    if exit_code < 0:
        how = f"was killed by {SIGNAL_NAMES.get(-exit_code, f'signal {-exit_code}')}"
    meaning = OF_SIGKILL if exit_code == -signal.SIGKILL else ""
    # NCCL's watchdog thread aborts the whole process when a peer is gone.
    echo = exit_code == -signal.SIGABRT and COMMUNICATION.search(tail) is not None
    text = f"{_name(rank)} {how}{meaning}{_place(where)}\nlast lines of {log}:\n{tail or '(empty)'}"
    outside = echo or -exit_code in ENDING_SIGNALS
    cause, place = f"{_name(rank)} {how}", describe_place(where)
    return Failure(rank, int(echo), time.time(), text, cause, place, from_outside=outside)


def _last_lines(log: Path) -> list[str]:
    """Returns the last lines of a log, or the first of a crash's report, which have the innermost calls."""
    if not log.exists():
        return []
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 2**16))
        lines = [line[:LOG_COLUMNS_SHOWN] for line in stream.read().decode(errors="replace").splitlines()]
    crash = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return lines[crash[-1] :][:LOG_LINES_SHOWN] if crash else lines[-LOG_LINES_SHOWN:]


def describe_place(where: dict[str, Any]) -> str:
    """Returns "cell 2, micro-batch 1, forward" for `{"cell": 2, "micro_batch": 1, "instruction": "forward"}`."""
    words = [f"{key.replace('_', '-')} {value}" for key, value in where.items() if key != "instruction"]
    return ", ".join([*words, where["instruction"].replace("_", " ")] if "instruction" in where else words)


def _place(where: dict[str, Any]) -> str:
    """Returns " at " and the place, or nothing if it is unknown."""
    return f" at {describe_place(where)}" if describe_place(where) else ""


def _name(rank: int) -> str:
    """Returns a process's name in messages."""
    return "the process that starts the workers" if rank == STARTER else f"worker {rank}"
