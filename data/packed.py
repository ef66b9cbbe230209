"""Finds and opens text files, plain or compressed, and refuses what is no text in UTF-8."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import ConfigurationError
from .records import JSON, PARQUET, ParquetLines

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FOREIGN = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
PACKED = (".gz", ".zst", ".xz", ".bz2")
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def visible_files(root: Path) -> Iterator[Path]:
    """Yields the files in and below a folder, without those whose name, or folder's name, begins with a dot."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def unpacked(path: Path) -> Path:
    """Returns the name of a file without the ending of its compression."""
    return path.with_suffix("") if path.suffix in PACKED else path


def ending_of(path: Path) -> str:
    """Returns the ending that says what is in the file."""
    return unpacked(path).suffix.lower()


def has_records(path: Path) -> bool:
    """Returns whether each line is a record (`records.texts_in`)."""
    return ending_of(path) in (*JSON, PARQUET)


def _opened(path: Path) -> BinaryIO:
    if path.suffix.lower() == PARQUET:
        return io.BufferedReader(ParquetLines(path), 1 << 20)
    if path.suffix == ".zst":
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(cast(Any, reader), 1 << 20)
    return cast(BinaryIO, OPENERS.get(path.suffix, open)(path, "rb"))


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Yields the opened file, to read its uncompressed bytes.

    Raises:
        ConfigurationError: it cannot be opened or unpacked.
    """
    try:
        with _opened(path) as file:
            yield file
    except ConfigurationError:
        raise
    except Exception as error:  # a torn archive raises OSError, EOFError or an error of its kind
        raise ConfigurationError(f"{path}: cannot be read ({error}): no access, or a torn archive") from error


def checked_start(path: Path, size: int = 4_096) -> bytes:
    """Returns a file's first `size` bytes.

    Raises:
        ConfigurationError: it is empty, begins as UTF-16 or UTF-32 text, or cannot be opened or unpacked.
    """
    with reading(path) as file:
        start = file.read(size)
    if not start:
        raise ConfigurationError(f"{path} is empty: put its text there, or remove the files of this language")
    encoding = next((name for mark, name in FOREIGN.items() if start.startswith(mark)), None)
    if encoding is None and 4 * start.count(0) > len(start):  # without a mark, half of the bytes of Latin letters
        encoding = "UTF-16"
    if encoding is not None:
        raise ConfigurationError(f"{path} is {encoding} text, not UTF-8: iconv -f {encoding} -t UTF-8 converts it")
    return start


def decoded(line: bytes) -> tuple[str, str | None]:
    """Returns a line's text, and the kind of the defect that makes it unusable (see `defects.KINDS`)."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "", "undecodable"
    return text, "nul" if "\0" in text else None
