"""What the commands have in common: the answers to --help and --version, and the exit codes. Imports nothing slow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from gpipe_cli import __version__
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.output import show

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes: it went wrong; a wrong configuration; Ctrl-C


def answer(
    words: Sequence[str],
    help_text: str | Callable[[], str],
    version_of: str | None = None,
    needs_words: bool = False,
) -> int | None:
    """What can be answered without any work; the exit code, or None where there is work to do.

    Args:
        words: of the command line.
        help_text: the page, or what makes it.
        version_of: the command, if it answers to --version.
        needs_words: without any words the page is shown too, for a wrong call.
    """
    if {"-h", "--help"} & set(words) or (needs_words and not words):
        show((help_text if isinstance(help_text, str) else help_text()).rstrip("\n"))
        return REFUSED if needs_words and not words else 0
    if version_of is not None and "--version" in words:
        show(f"{version_of} {__version__}")
        return 0
    return None


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def exit_code(name: str, work: Callable[[], int], say: Callable[[str], None] = to_stderr) -> int:
    """That of ``work``, or of how it ended instead.

    Args:
        name: of the command, before what it refuses.
        say: where the reason goes.
    """
    from gpipe_cli.launch.report import WorkerFailed

    try:
        return work()
    except ConfigurationError as error:
        say(f"{name}: {error}")
        return REFUSED
    except WorkerFailed as error:
        say(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
