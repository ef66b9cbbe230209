"""Ends a process with the one that started it. ``python -m gpipe_cli.parent PID MODULE …`` runs a module that way."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
PARENT_POLL_SECONDS = 0.5

_released = threading.Event()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process `parent`, which started it, ends.

    By SIGKILL, because a worker blocked inside gloo or NCCL never gets to run a Python signal handler. The comparison
    catches a parent that died before the request was made. Kernels other than Linux have no such request: there a
    thread polls.
    """
    if sys.platform == "linux":
        _request_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Withdraws the request of `die_with_parent`."""
    _released.set()
    if sys.platform == "linux":
        _request_death_signal(0)


def _request_death_signal(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def _watch_parent(parent: int) -> None:
    while not _released.wait(PARENT_POLL_SECONDS):
        if os.getppid() != parent:
            os._exit(1)


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line of a module's `main` that ends with this process, from its first moment on."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
