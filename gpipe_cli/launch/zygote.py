"""Runs the processes beside the command: the zygote, which imports torch once, and the workers that it forks.

So K workers cost little more than one. The zygote does nothing else, because a fork is only safe from a process with a
single thread and without CUDA; the command itself may have computed something. The workers die with the zygote, and it
ends them all when the command dies.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from gpipe_cli.disk import open_for_writing, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch import report
from gpipe_cli.launch.context import Context, call_entry
from gpipe_cli.launch.messenger import Messenger
from gpipe_cli.launch.stop import OF_BATCH_SYSTEMS
from gpipe_cli.parent import die_with_parent, outlive_parent
from gpipe_cli.position import Position

if TYPE_CHECKING:
    from torch.distributed import Store

TICK_SECONDS = 0.02
STOP = b"s"  # the command's word to a worker: end the run in order
REPORT_SECONDS = 5.0  # that a failed worker waits for a command that does not read


def run_zygote(job: dict[str, Any]) -> None:
    """Starts the workers of `job`, reports each one's end to the command, and leaves after the last.

    Until the workers run, this process is killed with the command (`child_command`).
    """
    for number in (signal.SIGINT, signal.SIGTERM, *OF_BATCH_SYSTEMS):  # they may be sent to every process of a job
        signal.signal(number, signal.SIG_IGN)
    command, control = os.getppid(), socket.socket(fileno=job["control"])
    control.set_inheritable(False)
    try:
        redirect_output(report.log_path(Path(job["directory"]), report.STARTER))
        workers = _start_workers(job, control)
    except Exception as error:
        control.sendall(encode({"failed": asdict(report.failure_of(report.STARTER, error, {}))}))
        raise
    outlive_parent()  # to kill the workers and their children
    _watch(workers, control, command)
    os._exit(0)


def _watch(workers: dict[int, int], control: socket.socket, command: int) -> None:
    """Reports each worker's end. When the command is gone, kills the group: workers, their children, this process."""
    while workers:
        if os.getppid() != command:
            os.killpg(0, signal.SIGKILL)
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in workers:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the command is gone: see above
                control.sendall(encode({"rank": workers.pop(process), "exit_code": code}))
        elif process == 0:
            time.sleep(TICK_SECONDS)


def _start_workers(job: dict[str, Any], control: socket.socket) -> dict[int, int]:
    """Imports the modules to preload and forks the workers; returns process id -> rank."""
    for module in job["preload"]:
        import_module(module)
    gc.freeze()  # the collector would otherwise write to, and so unshare, every page of torch
    sys.stdout.flush()
    sys.stderr.flush()
    workers, parent = {}, os.getpid()
    for rank in range(job["workers"]):
        process = os.fork()
        if process == 0:
            control.close()
            run_worker(job, parent, rank)
        workers[process] = rank
    for descriptor in (*job["channels"], *chain(*job["mailboxes"]), job["places"], job["store"]):
        os.close(descriptor)  # open here, they would hide from the command that a worker is gone
    return workers


def encode(message: dict[str, Any]) -> bytes:
    """Returns the message as one line. Scalars of numpy and torch become numbers, other foreign objects their `str`."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Returns what JSON can hold in place of a foreign object."""
    return value.item() if hasattr(value, "item") else str(value)


# -- a worker ----------------------------------------------------------------------------------------------------------


def run_worker(job: dict[str, Any], parent: int, rank: int) -> NoReturn:
    """Runs worker `rank` of the job that the command describes (supervisor.py); never returns.

    The process always ends by `os._exit`: a normal interpreter exit runs destructors that may wait for peers.
    """
    die_with_parent(parent)
    try:
        _run(job, rank)
        atexit._run_exitfuncs()
        leave(0)
    except BaseException as error:  # also when the set-up fails
        if not isinstance(error, ConfigurationError):  # which the command prints
            traceback.print_exc()
    finally:
        leave(1)


def _run(job: dict[str, Any], rank: int) -> None:
    """Sets up worker `rank`, calls the entry point, and sends its result or failure to the command."""
    _keep_running_on_signals()
    channels, mailboxes = job["channels"], job["mailboxes"]
    for other in set(range(job["workers"])) - {rank}:  # descriptors that only another worker may have
        os.close(channels[other])
        os.close(mailboxes[other][0])
    os.set_inheritable(job["store"], False)
    channel = Channel(channels[rank])
    context = Context(
        rank=rank,
        world_size=job["workers"],
        local_rank=rank,
        run_dir=Path(job["run_dir"]),
        open_store=partial(_open_store, job["store"], job["workers"]),
        emit=lambda event: channel.send({"event": event}),
        stop_requested=channel.stop_requested,
        messenger=Messenger(rank, mailboxes[rank][0], [sending for _, sending in mailboxes]),
        where=open_place(job["places"], rank),
    )
    try:
        redirect_output(report.log_path(Path(job["directory"]), rank))
        logging.basicConfig(level=logging.INFO, format=report.LOG_LINE, force=True)
        result = call_entry(resolve_name(job["entry"]), context, job["config"], job["threads"])
        channel.send_last(json.dumps({"finished": result}).encode() + b"\n")
    except BaseException as error:
        failure = report.failure_of(rank, error, context.where.known())
        channel.send_last(encode({"failed": asdict(failure)}), REPORT_SECONDS)  # no file: the disk may be full
        raise


class Channel:
    """Connects a worker to the command by JSON lines over a socket. The command may read late or be gone."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._pending = bytearray()
        self._lock = threading.Lock()
        self._stop = False

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; never waits."""
        line = encode(message)
        with self._lock:
            self._pending += line
            self._flush()

    def _flush(self) -> None:
        """Sends as much of what is pending as the socket takes now."""
        try:
            while self._pending:
                del self._pending[: self._socket.send(self._pending)]
        except BlockingIOError:
            return  # the rest is sent with the next message
        except OSError:
            self._pending.clear()  # the command is gone; the zygote will end this process too

    def stop_requested(self) -> bool:
        """Returns whether the command has ever asked for the end of the run."""
        if not self._stop:
            try:
                self._stop = STOP in self._socket.recv(16)
            except OSError:  # nothing to read
                return False
        return self._stop

    def send_last(self, line: bytes, seconds: float | None = None) -> None:
        """Sends this worker's last message; waits `seconds` at most (None: for ever) until the socket takes it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(seconds)
            self._socket.sendall(bytes(self._pending) + line)
            self._pending.clear()


def open_place(descriptor: int, rank: int) -> Position:
    """Returns the `Position` of worker ``rank`` in the memory that the command reads; closes the descriptor."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return Position(memoryview(memory)[rank * Position.SIZE : (rank + 1) * Position.SIZE])


def leave(code: int) -> NoReturn:
    """Ends this process at once, without exit handlers."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Log(io.FileIO):
    """Writes bytes to a descriptor. What a full disk does not take is lost without an error."""

    def write(self, content: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(content)
        return memoryview(content).nbytes


def redirect_output(log: Path) -> None:
    """Appends this process's output, C++ libraries' included, to the file `log`; its input becomes empty.

    Raises:
        DiskError: the file cannot be opened.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with writing(log):
        output = open_for_writing(log)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.close(output)
    os.close(nothing)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(_Log(number, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for number in (1, 2)
    )


def _keep_running_on_signals() -> None:
    """Makes a worker ignore requests to stop, on which the command decides, and log its stacks on SIGTERM.

    Batch systems send a signal to every process of a job at once; a worker that died of it could not save any more.
    The workers' own children keep the default rules, or `multiprocessing.Pool.terminate` would wait for ever. A signal
    sent to a child that has not restored them yet waits until it has: SIGTERM is blocked for as long as a fork takes.
    """
    for number in (signal.SIGINT, *OF_BATCH_SYSTEMS):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM)
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)


def _open_store(memory: int, workers: int) -> Store:
    """Returns the workers' key-value store, in a memory without a name; `memory` is its descriptor."""
    from torch.distributed import FileStore

    return FileStore(f"/proc/self/fd/{memory}", workers)
