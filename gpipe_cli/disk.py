"""Reads and writes the files of a run, and says which one is damaged or cannot be written, and why. No slow imports."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe_cli.errors import PlainError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # whatever the file was, its disk is the cause
FEW_BYTES = 16_384


class DiskError(PlainError):
    """Raised when a file cannot be written; the message names the file, the reason and the room that is left."""


class Vanished(DiskError):
    """Raised when a file or folder that a run writes to is no longer at its path."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} cannot be written: it, or a folder above it, was moved, deleted or replaced during the run, which "
            "ends here. If it was moved, put it back to continue from its newest checkpoint"
        )


@contextmanager
def writing(path: Path, advice: str = "") -> Iterator[None]:
    """Turns an OSError about ``path``, a file or a folder, while the context lasts into a `DiskError`.

    Args:
        advice: what to do about it, for the end of the message.
    """
    try:
        yield
    except OSError as error:
        wanted, named = path.absolute(), (_file_of(error) or path).absolute()
        if not (str(named).startswith(str(wanted)) or wanted.is_relative_to(named)):  # drafts have longer names
            raise  # about a file that is read
        raise DiskError(cannot_write(path, error) + (f": {advice}" if advice else "")) from error


def open_for_writing(path: Path, flags: int = os.O_WRONLY | os.O_TRUNC) -> int:
    """Returns a descriptor of the file itself, made if it is not there; a symbolic link in its place is an OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically. Unlike a checkpoint's files it may be lost when the machine crashes.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with os.fdopen(open_for_writing(draft), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def json_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line with its JSON object; None where the line holds none, because it is damaged."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        yield line, row if isinstance(row, dict) else None


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the objects of a file of JSON lines, and the numbers of its damaged lines; none without the file."""
    if not path.is_file():
        return [], []
    with path.open("rb") as file:
        found = [row for _, row in json_lines(file)]
    return [row for row in found if row is not None], [n for n, row in enumerate(found, 1) if row is None]


def skipped(path: Path, damaged: Sequence[int]) -> str:
    """Returns one line about the damaged lines of a file."""
    more = f" and {len(damaged) - 8} more" if len(damaged) > 8 else ""
    return f"{path}: damaged and skipped: line {', '.join(map(str, damaged[:8]))}{more}"


def prepare_directory(directory: Path) -> None:
    """Makes a directory, and finds out whether a few small files can be written there.

    Raises:
        DiskError: they cannot.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(FEW_BYTES))
            file.flush()


def cannot_write(path: Path, error: OSError) -> str:
    """Returns one line for the console: the file, the reason, and the room that is left where it should lie."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path} cannot be written: {reason} ({room(path)})"


def room(path: Path) -> str:
    """Returns the bytes and files that still fit where ``path`` is, or should be, for a message."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = os.statvfs(place)
    files = f", {free.f_favail:,} files" if free.f_files else ""
    return f"room left: {free.f_bavail * free.f_frsize / 1e6:,.1f} MB{files}"


def explain(error: BaseException) -> str | None:
    """Returns one line for an error of the disk that no code has explained; else None."""
    if not isinstance(error, OSError) or error.errno not in DISK:
        return None
    file = _file_of(error)
    return f"a file cannot be written: {os.strerror(error.errno)}" if file is None else cannot_write(file, error)


def _file_of(error: OSError) -> Path | None:
    """Returns the file that an error is about: of a copy or a rename its second one."""
    file = error.filename if error.filename2 is None else error.filename2
    return None if file is None else Path(os.fsdecode(file))
