"""Implements the commands. Ctrl-C ends one at once, without a traceback, until it handles it (`run_command`)."""

import signal
import sys
from pathlib import Path

_is_started = Path(sys.argv[0]).name.startswith(("-m", "gpipe-"))  # not imported by a program of the user's
if _is_started and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
