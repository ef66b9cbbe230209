"""Describes files that cannot be written: which one, why, and how much room is left. No slow imports."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe_cli.errors import PlainError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # whatever the file was, its disk is the cause


class DiskError(PlainError):
    """Raised when a file cannot be written; the message names the file, the reason and the room that is left."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError while the context lasts into a `DiskError` about ``path``, a file or a folder."""
    try:
        yield
    except OSError as error:
        raise DiskError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: OSError) -> str:
    """Returns one line for the console: the file, the reason, and the room that is left where it should lie."""
    place = f"{path}" if error.filename in (None, str(path), path) else f"{path} ({error.filename})"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{place} cannot be written: {reason} ({room(path)})"


def room(path: Path) -> str:
    """Returns the bytes and files that still fit where ``path`` is, or should be, for a message."""
    for place in (path.absolute(), *path.absolute().parents):
        try:
            free = os.statvfs(place)
        except OSError:
            continue
        files = f", {free.f_favail:,} files" if free.f_files else ""
        return f"room left: {free.f_bavail * free.f_frsize / 1e6:,.1f} MB{files}"
    return "room left: unknown"


def explain(error: BaseException) -> str | None:
    """Returns one line for an error of the disk, also where the code that wrote did not name the file; else None."""
    if not isinstance(error, OSError) or error.errno not in DISK:
        return None
    if error.filename is not None:
        return cannot_write(Path(os.fsdecode(error.filename)), error)
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" (at {frame[0].filename}, line {frame[0].lineno})" if frame else ""
    return f"a file cannot be written{at}: {os.strerror(error.errno)}"
