"""Writes to standard output and error, also when their reader is gone. No slow imports."""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpipe_cli.disk import DISK, DiskError, prepare_directory
from gpipe_cli.errors import ConfigurationError, PlainError, visible

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
            discard(failed)
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


class OutputFailed(PlainError):
    """Raised when standard output cannot be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written ({error.strerror})")
        self.reader_is_gone = isinstance(error, BrokenPipeError)


def show(text: str) -> None:
    """Prints ``text``.

    Raises:
        OutputFailed: it cannot be written.
    """
    try:
        _write(sys.stdout, f"{visible(text)}\n")
        sys.stdout.flush()
    except OSError as error:
        raise OutputFailed(error) from error


def open_closed_streams() -> None:
    """Opens /dev/null in place of closed standard streams, so that no other file gets their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # open to the end


def require_writable(key: str, folder: str | Path) -> None:
    """Makes a folder in which files can be written.

    Args:
        key: that names the folder.

    Raises:
        ConfigurationError: it has no name, it cannot be made, or nothing may be written there.
        DiskError: its disk is full or fails.
    """
    if not str(folder):
        raise ConfigurationError(f"{key}= is empty: name a folder, or leave it out")
    try:
        prepare_directory(Path(str(folder)).expanduser())
    except (DiskError, ValueError, RuntimeError) as error:  # a NUL character; a home that is not known
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK:
            raise
        raise ConfigurationError(f"{key}={folder}: {error}: name a folder that can be made and written") from error


def reader_is_gone() -> bool:
    """Returns whether standard output is a pipe or terminal without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard(stream: IO[str]) -> None:
    """Sends what waits in the stream, and all that follows, to /dev/null."""
    with suppress(OSError, ValueError):
        _redirect_to_nothing(stream)
