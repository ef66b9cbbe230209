"""Starts Python processes that end with the one that started them."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process `parent`, which started it, ends.

    It is SIGKILL, because a worker blocked inside gloo or NCCL never runs a Python signal handler. The comparison
    below notices a parent that ended before the request.
    """
    _request_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Stops this process from being killed when its parent ends.

    The parent's end now sends SIGCONT, in case this process is stopped.
    """
    _request_death_signal(signal.SIGCONT)


def _request_death_signal(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def child_command(code: str) -> list[str]:
    """Returns the command line of a Python process that runs ``code`` and is killed when this process ends.

    It has this process's import path, whatever way this one was started (console script, -m, a clone on PYTHONPATH).
    Python's own would begin with the working directory, where others may write.
    """
    begin = f"import sys; sys.path[:] = {sys.path!r}; from gpipe_cli.parent import die_with_parent"
    return [sys.executable, "-c", f"{begin}; die_with_parent({os.getpid()}); {code}"]
