"""Runs the process that starts the workers: it imports torch once and forks them, so K cost little more than one.

It does nothing else, because a fork is only safe from a process with a single thread and without CUDA; the command
itself may have computed something. The workers die with this process, and it ends them all when the command dies.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any

from gpipe_cli.launch import report, worker
from gpipe_cli.launch.channel import encode
from gpipe_cli.launch.worker import redirect_output
from gpipe_cli.parent import child_command, outlive_parent

TICK_SECONDS = 0.02


def bootstrap(module: str, *arguments: int) -> list[str]:
    """Returns the command line that runs `main` of gpipe_cli.launch.`module`; it reads the job from its input."""
    integers = ", ".join(map(str, (os.getpid(), *arguments)))
    return child_command(
        f"import json; from gpipe_cli.launch.{module} import main; main(json.load(sys.stdin), {integers})"
    )


def hand_over(job: dict[str, Any], pipe: IO[bytes]) -> None:
    """Writes the job to a new process's input; not to a file, which another user might change."""
    with contextlib.suppress(BrokenPipeError), pipe:  # broken: the process has ended, which is reported elsewhere
        pipe.write(json.dumps(job).encode())


def main(job: dict[str, Any], parent: int) -> None:
    """Starts the workers of `job`, reports each one's end to the command, and leaves after the last.

    Args:
        parent: the command. Until the workers run, this process is killed with it (`child_command`).
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor sends SIGTERM to the whole process group
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
    fork = job["fork"]
    if fork:
        for module in job["preload"]:
            import_module(module)
        if reason := _reason_not_to_fork():
            fork = False
            control.sendall(encode({"warning": f"{reason}: workers start one by one, which takes longer"}))
        gc.freeze()  # the collector would otherwise write to, and so unshare, every page of torch
        sys.stdout.flush()
        sys.stderr.flush()
    workers, parent = {}, os.getpid()
    for rank in range(job["workers"]):
        if fork:
            process = os.fork()
            if process == 0:
                control.close()
                worker.main(job, parent, rank)
        else:  # not by `subprocess`, which may reap a child that `os.waitpid` waits for
            process = _spawn(job, rank)
        workers[process] = rank
    for descriptor in (*job["channels"], *chain(*job["mailboxes"]), job["places"], *job["store_memory"]):
        os.close(descriptor)  # open here, they would hide from the command that a worker is gone
    return workers


def _spawn(job: dict[str, Any], rank: int) -> int:
    """Returns the process id of a worker that is a new interpreter."""
    command = bootstrap("worker", rank)
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
