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
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from gpipe_cli.disk import open_for_writing, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch import report
from gpipe_cli.launch.channel import WorkerChannel, encode, open_place
from gpipe_cli.launch.context import Context, call_entry
from gpipe_cli.launch.messenger import Messenger
from gpipe_cli.launch.stop import OF_BATCH_SYSTEMS
from gpipe_cli.parent import child_command, die_with_parent, outlive_parent

if TYPE_CHECKING:
    from torch.distributed import Store

TICK_SECONDS = 0.02


def bootstrap(function: str, *arguments: int) -> list[str]:
    """Returns the command line that runs a function of this file; it reads the job from its input."""
    integers = ", ".join(map(str, (os.getpid(), *arguments)))
    return child_command(
        f"import json; from gpipe_cli.launch.zygote import {function} as run; run(json.load(sys.stdin), {integers})"
    )


def hand_over(job: dict[str, Any], pipe: IO[bytes]) -> None:
    """Writes the job to a new process's input; not to a file, which another user might change."""
    with contextlib.suppress(BrokenPipeError), pipe:  # broken: the process has ended, which is reported elsewhere
        pipe.write(json.dumps(job).encode())


def run_zygote(job: dict[str, Any], parent: int) -> None:
    """Starts the workers of `job`, reports each one's end to the command, and leaves after the last.

    Args:
        parent: the command. Until the workers run, this process is killed with it (`child_command`).
    """
    for number in (signal.SIGINT, signal.SIGTERM, *OF_BATCH_SYSTEMS):  # they may be sent to every process of a job
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=job["control"])
    control.set_inheritable(False)
    try:
        redirect_output(report.log_path(Path(job["directory"]), report.STARTER))
        workers = _start_workers(job, control)
    except Exception as error:
        control.sendall(encode({"failed": asdict(report.failure_of(report.STARTER, error, {}))}))
        raise
    outlive_parent()  # to kill the workers and their children
    _watch(workers, control, parent)
    os._exit(0)


def _watch(workers: dict[int, int], control: socket.socket, parent: int) -> None:
    """Reports each worker's end. When the command is gone, kills the group: workers, their children, this process."""
    while workers:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in workers:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the command is gone: see above
                control.sendall(encode({"rank": workers.pop(process), "exit_code": code, "time": time.time()}))
        elif process == 0:
            time.sleep(TICK_SECONDS)


def _start_workers(job: dict[str, Any], control: socket.socket) -> dict[int, int]:
    """Returns the rank of each process id."""
    for module in job["preload"]:
        import_module(module)
    if reason := _reason_not_to_fork():
        control.sendall(encode({"warning": f"{reason}: workers start one by one, which takes longer"}))
    gc.freeze()  # the collector would otherwise write to, and so unshare, every page of torch
    sys.stdout.flush()
    sys.stderr.flush()
    workers, parent = {}, os.getpid()
    for rank in range(job["workers"]):
        # Not by `subprocess`, which may reap a child that `os.waitpid` waits for.
        process = _spawn(job, rank) if reason else os.fork()
        if process == 0:
            control.close()
            run_worker(job, parent, rank)
        workers[process] = rank
    for descriptor in (*job["channels"], *chain(*job["mailboxes"]), job["places"], job["store"]):
        os.close(descriptor)  # open here, they would hide from the command that a worker is gone
    return workers


def _spawn(job: dict[str, Any], rank: int) -> int:
    """Returns the process id of a worker that is a new interpreter."""
    command = bootstrap("run_worker", rank)
    read_end, write_end = os.pipe()
    process = os.posix_spawn(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, read_end, sys.stdin.fileno())]
    )
    os.close(read_end)
    hand_over(job, os.fdopen(write_end, "wb"))
    return process


def _reason_not_to_fork() -> str:
    """Returns why a fork of this process would be dangerous; empty if it is safe. Linux only.

    A forked child has one thread, so a lock that another thread of the parent held stays locked for ever, and a CUDA
    driver that was in use cannot be used in a child at all.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing the preloaded modules started {threads - 1} threads"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return "importing the preloaded modules initialised CUDA"
    return ""


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
        if not isinstance(error, ConfigurationError):  # the command tells it
            traceback.print_exc()
    finally:
        leave(1)


def _run(job: dict[str, Any], rank: int) -> None:
    _keep_running_on_signals()
    channel, messenger = _take_descriptors(job, rank)
    context = Context(
        rank=rank,
        world_size=job["workers"],
        local_rank=rank,
        run_dir=Path(job["run_dir"]),
        open_store=partial(_open_store, job["store"], job["workers"]),
        emit=lambda event: channel.send({"event": event}),
        stop_requested=channel.stop_requested,
        messenger=messenger,
        where=open_place(job["places"], rank),
    )
    try:
        redirect_output(report.log_path(Path(job["directory"]), rank))
        logging.basicConfig(level=logging.INFO, format=report.LOG_LINE, force=True)
        channel.finish(call_entry(job["entry"], context, job["config"], job["threads"]))
    except BaseException as error:
        channel.fail(report.failure_of(rank, error, context.where.known()))
        raise


def leave(code: int) -> NoReturn:
    """Ends this process at once, without exit handlers."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Log(io.FileIO):
    """Writes bytes to a descriptor; those that a full disk does not take are lost, and nothing is raised."""

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
    """Ignores requests to stop, on which the command decides; on SIGTERM writes all stacks to the log, even inside C++.

    Batch systems send a signal to every process of a job at once; a worker that died of it could not save any more.
    The workers' own children keep the default rules, or `multiprocessing.Pool.terminate` would wait for ever. A signal
    sent to a child that has not restored them yet waits until it has: SIGTERM is blocked for as long as a fork takes.
    """
    for number in (signal.SIGINT, *OF_BATCH_SYSTEMS):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM)

    def restore_in_child() -> None:
        faulthandler.unregister(signal.SIGTERM)
        _mask_sigterm(signal.SIG_UNBLOCK)

    os.register_at_fork(
        before=lambda: _mask_sigterm(signal.SIG_BLOCK),
        after_in_parent=lambda: _mask_sigterm(signal.SIG_UNBLOCK),
        after_in_child=restore_in_child,
    )


def _mask_sigterm(how: int) -> None:
    signal.pthread_sigmask(how, {signal.SIGTERM})


def _take_descriptors(job: dict[str, Any], rank: int) -> tuple[WorkerChannel, Messenger]:
    """Takes this worker's own descriptors out of the job's, and closes those that only another worker may have."""
    channels, mailboxes = job["channels"], job["mailboxes"]
    for other in set(range(job["workers"])) - {rank}:
        os.close(channels[other])
        os.close(mailboxes[other][0])
    os.set_inheritable(job["store"], False)
    return WorkerChannel(channels[rank]), Messenger(rank, mailboxes[rank][0], [sending for _, sending in mailboxes])


def _open_store(memory: int, workers: int) -> Store:
    from torch.distributed import FileStore

    return FileStore(f"/proc/self/fd/{memory}", workers)
