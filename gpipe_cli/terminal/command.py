"""Defines what all commands share: answers to --help and --version, what they print, exit codes. No slow imports."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpipe_cli import __version__
from gpipe_cli.disk import explain
from gpipe_cli.errors import ConfigurationError, PlainError, visible
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.launch.srun import adopt_step
from gpipe_cli.terminal.text import relative_paths

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes: failed; wrong configuration; Ctrl-C


def run_command(
    name: str,
    arguments: Sequence[str] | None,
    page: str,
    work: Callable[[list[str]], int],
    needs_words: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Runs a command and returns its exit code, or the code of the error that ended it.

    Args:
        name: of the command, printed before the reason of a refusal.
        arguments: the words of the command line; None: those of this process.
        page: of --help.
        work: gets the words.
        needs_words: shows the page, as for a wrong call, when there are no words.
        say: prints the reason of a refusal or a failure; None: on standard error.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # its encoding may be Latin-1 or ASCII
    adopt_step(os.environ)

    def answer() -> int:
        if {"-h", "--help"} & set(words) or (needs_words and not words):
            show(page.rstrip("\n"))
            return REFUSED if needs_words and not words else 0
        if "--version" in words:
            show(f"{name} {__version__}")
            return 0
        return work(words)

    code = exit_code(name, answer, say or to_stderr)
    try:
        sys.stdout.flush()
    except OSError:  # what failed before is still in its buffer
        discard(sys.stdout)
    return code


def exit_code(name: str, work: Callable[[], int], say: Callable[[str], None]) -> int:
    """Runs a command's work and returns its exit code, or the code of the error that ended it."""
    try:
        return work()
    except ConfigurationError as error:
        say(f"{name}: {relative_paths(str(error))}")
        return REFUSED
    except (PlainError, WorkerFailed) as error:
        say(relative_paths(str(error)))
        return FAILED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # it was another pipe
        return 0  # a reader that stops early, as `head` does
    except OSError as error:
        if (text := explain(error)) is None:
            raise
        say(f"{name}: {relative_paths(text)}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def show(text: str) -> None:
    """Prints a text on standard output, control characters written out."""
    print(visible(text), flush=True)


def to_stderr(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        print(visible(text), file=sys.stderr, flush=True)


def discard(stream: IO[str]) -> None:
    """Sends what waits in the stream, and all that follows, to /dev/null."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def _reader_is_gone() -> bool:
    """Returns whether standard output is a pipe or terminal without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
