"""The process that starts the workers: it imports torch once and forks them, so that K cost little more than one.

It does nothing else, because a fork is only safe from a process with a single thread and without CUDA: the command
itself, which may have computed something, could not do this. The workers die with it, and it ends all of them when
the command dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from gpipe_cli.launch import report, worker
from gpipe_cli.launch.channel import encode
from gpipe_cli.launch.process import reason_not_to_fork, redirect_output, request_death_signal

TICK_SECONDS = 0.02

# Run with the job file's path and further integers; gives the new process the command's import path, whatever way the
# command was started (console script, -m, a clone on PYTHONPATH).
BOOTSTRAP = (
    "import json, sys; job = json.load(open(sys.argv[1])); sys.path[:] = job['sys_path']; "
    "from gpipe_cli.launch.{module} import main; main(job, *map(int, sys.argv[2:]))"
)


def bootstrap(module: str, job_file: Path, *arguments: int) -> list[str]:
    """The command line that runs gpipe_cli.launch.`module`'s main."""
    return [sys.executable, "-c", BOOTSTRAP.format(module=module), str(job_file), *map(str, arguments)]


def main(job: dict[str, Any], parent: int) -> None:
    """Start the workers of `job`, tell the command of each one's end, and leave after the last."""
    if sys.platform == "linux":
        request_death_signal(signal.SIGKILL)  # for as long as the imports take
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor sends SIGTERM to the whole process group
        signal.signal(number, signal.SIG_IGN)
    directory = Path(job["directory"])
    redirect_output(report.log_path(directory, report.STARTER))
    control = socket.socket(fileno=job["control"])
    control.set_inheritable(False)
    try:
        workers = _start_workers(job, directory, control)
    except Exception as error:
        report.write_error(directory, report.STARTER, error, {})
        raise
    if sys.platform == "linux":
        request_death_signal(0)
    _watch(workers, control, parent)
    os._exit(0)


def _watch(workers: dict[int, int], control: socket.socket, parent: int) -> None:
    """Tell of each worker's end; when the command is gone, kill the group: workers, their children, this process."""
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


def _start_workers(job: dict[str, Any], directory: Path, control: socket.socket) -> dict[int, int]:
    """Returns: the rank of each process id."""
    if job["fork"]:
        for module in job["preload"]:
            import_module(module)
        reason = reason_not_to_fork()
        if not reason:
            return _fork_workers(job, control)
        control.sendall(encode({"warning": f"{reason}: workers start one by one, which takes longer"}))
    return _execute_workers(job, directory / "job.json")


def _fork_workers(job: dict[str, Any], control: socket.socket) -> dict[int, int]:
    gc.freeze()  # the collector would otherwise write to, and so unshare, every page of torch
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    workers = {}
    for rank in range(job["workers"]):
        process = os.fork()
        if process == 0:
            control.close()
            worker.main(job, rank, parent)
        workers[process] = rank
    _close_inherited(job)
    return workers


def _execute_workers(job: dict[str, Any], job_file: Path) -> dict[int, int]:
    """By posix_spawn rather than subprocess, which may reap a child behind the back of `os.wait`."""
    workers = {}
    for rank in range(job["workers"]):
        command = bootstrap("worker", job_file, rank, os.getpid())
        workers[os.posix_spawn(command[0], command, os.environ)] = rank
    _close_inherited(job)
    return workers


def _close_inherited(job: dict[str, Any]) -> None:
    """With these open here, the command could not tell when a worker is gone."""
    for descriptor in (job["listener"], *job["sockets"]):
        os.close(descriptor)
