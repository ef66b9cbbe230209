"""Starts Python processes that end with the one that started them."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process `parent`, which started it, ends.

    By SIGKILL, because a worker blocked inside gloo or NCCL never gets to run a Python signal handler. The comparison
    catches a parent that died before the request was made.
    """
    _request_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Withdraws the request of `die_with_parent`; the parent's end continues this process if it is stopped then."""
    _request_death_signal(signal.SIGCONT)


def _request_death_signal(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def child_command(code: str) -> list[str]:
    """Returns the command line of a Python process that runs ``code``, and ends with this one from its start on.

    It has this process's import path, whatever way this one was started (console script, -m, a clone on PYTHONPATH).
    Python's own would begin with the working directory, where others may write.
    """
    begin = f"import sys; sys.path[:] = {sys.path!r}; from gpipe_cli.parent import die_with_parent"
    return [sys.executable, "-c", f"{begin}; die_with_parent({os.getpid()}); {code}"]
