"""Opens every file that the program writes, and says which one cannot be written, and why. No slow imports.

A file is replaced by a new one (`whole_file`), or opened without following a link in its place.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from gpipe_cli.errors import OF_PATHS, ConfigurationError, PlainError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # whatever the file was, its disk is the cause
# A place that was typed wrong gives one of these.
NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EROFS, errno.EINVAL, *OF_PATHS)
SCARCE = {errno.EMFILE: "open files", errno.ENFILE: "open files", errno.EAGAIN: "processes", errno.ENOMEM: "memory"}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the first line of a file that was not fetched
DRAFT = ".partial-"  # the names of drafts, which a killed process leaves, begin with it


class DiskError(PlainError):
    """Raised when a file cannot be written; the message names the file, the reason and the room that is left."""


class NotRegular(PlainError, OSError):
    """Raised where a file should be and a folder, a pipe or a device is."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def cache_folder(cache_dir: str | None) -> Path:
    """Returns `cache_dir`, or `$GPIPE_CACHE`, or `~/.cache/gpipe`."""
    return Path(cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()


@contextmanager
def writing(path: Path, advice: str = "", chosen: bool = False) -> Iterator[None]:
    """Turns an OSError about ``path``, a file or a folder, into a `DiskError`, within the context.

    Args:
        advice: words for the end of the message, which say what to do.
        chosen: True if the user chose the place: it is a ConfigurationError if no file can ever be made there.
    """
    try:
        yield
    except OSError as error:
        wanted, named = path.absolute(), (_file_of(error) or path).absolute()
        if named.name.startswith(DRAFT):
            named = wanted if named.parent == wanted.parent else named.parent
        if not (named.is_relative_to(wanted) or wanted.is_relative_to(named)):
            raise  # about a file that is read
        kind = ConfigurationError if chosen and error.errno in NO_PLACE else DiskError
        raise kind(cannot_write(named, error) + (f": {advice}" if advice else "")) from error


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file without waiting; returns its descriptor.

    Raises:
        NotRegular: it is a folder, a device, or a pipe, which may never end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Returns the content of a regular file, or its first bytes.

    Args:
        most: the number of bytes; -1: all.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)


def refuse_pointer(path: Path) -> None:
    """Raises ConfigurationError for a pointer of Git LFS, which stands where a large file was not fetched."""
    if read_bytes(path, len(LFS_POINTER)) == LFS_POINTER:
        raise ConfigurationError(f"{path} is a pointer of Git LFS, not the file: fetch it with git lfs pull")


def open_for_writing(path: Path) -> int:
    """Opens a file to append to, and makes it if it is not there; returns its descriptor. A link is an OSError."""
    return open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)


def locked(descriptor: int, wait: bool = False) -> bool:
    """Locks an open file until its descriptor is closed; returns False if another process has locked it.

    On a file system without locks it returns True for every process.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a new empty file, which replaces `path` when the block has ended, so that no reader sees half a file.

    Raises:
        NotRegular: a device, a pipe or a folder is at `path`.
    """
    if path.exists() and not path.is_file():
        raise NotRegular(errno.EINVAL, "it is no regular file", str(path))
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(8)}{path.suffix}")  # numpy wants its ending
    draft.touch(exist_ok=False)
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically. Unlike a checkpoint's files it may be lost when the machine crashes.

    Bytes of a file's name that are no UTF-8 are written as \\udcXX.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


class LogFile(logging.FileHandler):
    """Appends records to a file. They are lost if it cannot be opened or is a link."""

    def _open(self) -> TextIOWrapper:
        try:
            descriptor = open_for_writing(Path(self.baseFilename))
        except OSError:
            descriptor = os.open(os.devnull, os.O_WRONLY)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def cannot_write(path: Path, error: OSError) -> str:
    """Returns one line for the console: the file, the reason and, on a full disk, how much room is left."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: {reason}"
    free = os.statvfs(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()))
    files = f", {free.f_favail:,} files" if free.f_files else ""
    return f"{path} cannot be written: {reason} (room left: {free.f_bavail * free.f_frsize / 1e6:,.1f} MB{files})"


def explain(error: BaseException) -> str | None:
    """Returns one line that explains an error of the disk or a limit of the system; None for other errors."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    scarce = SCARCE.get(number or 0)
    if scarce is not None:
        return f"this machine or account allows no more {scarce} (ulimit -a shows its limits): raise the limit"
    if not isinstance(error, OSError) or error.errno not in DISK:
        return None
    file = _file_of(error)
    return f"a file cannot be written: {os.strerror(error.errno)}" if file is None else cannot_write(file, error)


def _file_of(error: OSError) -> Path | None:
    """Returns the file that an error is about, the second of a copy or a rename; None if it names none."""
    file = error.filename if error.filename2 is None else error.filename2
    return None if file is None else Path(os.fsdecode(file))
