"""Implements the commands. Ctrl-C ends one at once, without a traceback, until it handles it (`run_command`)."""

import signal
import sys
from pathlib import Path

# Not where a program of the user's imports them.
if Path(sys.argv[0]).name.startswith(("-m", "gpipe-")) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
