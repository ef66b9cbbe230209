"""What a process of the job does to itself first: die with its parent, write to its own log, keep its signals."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
PARENT_POLL_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """Have this process killed when process `parent`, which started it, ends for whatever reason.

    SIGKILL, because a worker blocked inside gloo or NCCL never gets to run a Python signal handler. The comparison
    catches a parent that died before the request was made. Where the kernel has no such request, a thread looks.
    """
    if sys.platform == "linux":
        request_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def request_death_signal(number: int) -> None:
    """Ask the Linux kernel for this signal when the parent ends; 0 takes the request back."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def redirect_output(log: Path) -> None:
    """Append this process's output, C++ libraries' included, to the file `log`; it reads nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, number)
    os.close(target)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def keep_worker_signals() -> None:
    """Leave every decision to stop to the command; on SIGTERM only write all stacks to the log, even inside C++.

    Batch systems send SIGTERM to every process of a job at once: workers that died of it could not save any more.
    The workers' own children go by the ordinary rules, or `multiprocessing.Pool.terminate` would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))


def reason_not_to_fork() -> str:
    """Why a fork of this process would be dangerous; empty if it is safe. Linux only.

    A forked child has one thread, so a lock that another thread of the parent held stays locked for ever, and a CUDA
    driver that was in use cannot be used in a child at all.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing the preloaded modules started {threads - 1} threads"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("/dev/nvidia"):
            return "importing the preloaded modules initialised CUDA"
    return ""
