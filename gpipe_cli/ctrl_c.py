"""Lets Ctrl-C end a command at once, without a traceback, until the command handles it (`run_command`).

Imported before all else, and without effect in a program of the user's that imports this package.
"""

import signal
import sys

_script = sys.argv[0].rpartition("/")[2]
_is_command = _script.startswith("gpipe-") and "." not in _script
_is_command |= _script == "-m" and any("gpipe_cli.commands." in word for word in sys.orig_argv)
if _is_command and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
