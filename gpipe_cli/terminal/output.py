"""Writes to standard output and error, also when their reader is gone. No slow imports."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO

log = logging.getLogger("gpipe_cli")


class OutputStream:
    """Wraps standard output or error so that a run goes on when they can no longer be written.

    The reader of a pipe may have died, the terminal may be closed, the disk behind a `>` may be full. After the first
    failure everything goes to /dev/null: also Python's own buffers, which it would fail to flush at its end, and what
    the user's code prints.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None: Python was started with this stream closed

    def write(self, text: str) -> int:
        self._guard(lambda stream: _write(stream, text))
        return len(text)

    def flush(self) -> None:
        self._guard(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no such stream")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _guard(self, action: Callable[[IO[str]], object]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed in this process
            failed, self._stream = self._stream, None
            with suppress(OSError, ValueError):
                _redirect_to_nothing(failed)
            # Not a warning, which the console would print: this may be rich's thread, which holds rich's lock.
            name = getattr(failed, "name", "the output")
            log.info("%s cannot be written to (%s): nothing more is printed there, the run goes on", name, error)


def _write(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:  # the terminal's encoding is Latin-1 or ASCII
        known = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(known, errors="replace").decode(known))


def _redirect_to_nothing(stream: IO[str]) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, stream.fileno())
    finally:
        os.close(nothing)


def show(text: str) -> None:
    """Prints ``text``. A reader that stops early, such as `head`, is no error; a full disk is.

    Raises:
        OSError: the text cannot be written.
    """
    try:
        _write(sys.stdout, f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _redirect_to_nothing(sys.stdout)
