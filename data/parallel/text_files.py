"""Lines of plain, gzip- and zstd-compressed files, as bytes: what they mean is found out line by line."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from ...errors import ConfigurationError
from .folders import PairFiles


class Piece(NamedTuple):
    """Consecutive lines of a pair of files; of a TSV file, `targets` is None.

    Attributes:
        number: of the piece within its files.
        first: the first line's number, from 1.
    """

    number: int
    first: int
    sources: list[bytes]
    targets: list[bytes] | None


def open_lines(path: Path) -> BinaryIO:
    """The file's bytes, uncompressed.

    Raises:
        ConfigurationError: it cannot be opened.
    """
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        if path.suffix == ".zst":
            import zstandard

            reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
            return cast(BinaryIO, io.BufferedReader(reader, 1 << 20))
        return path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from error


def read_pieces(files: PairFiles, size: int) -> Iterator[Piece]:
    """The lines in pieces of `size`. Only "\\n" ends a line; up to the shorter file's end, see `count_lines`."""
    for number, piece in enumerate(_read(files, size)):
        yield Piece(number, number * size + 1, *piece)


def _read(files: PairFiles, size: int) -> Iterator[tuple[list[bytes], list[bytes] | None]]:
    with open_lines(files.source) as sources:
        if files.target is None:
            while lines := _take(sources, size, files.source):
                yield lines, None
            return
        with open_lines(files.target) as targets:
            while (lines := _take(sources, size, files.source)) and (others := _take(targets, size, files.target)):
                both = min(len(lines), len(others))
                yield lines[:both], others[:both]


def _take(file: BinaryIO, size: int, path: Path) -> list[bytes]:
    try:
        return list(islice(file, size))
    except Exception as error:  # a torn archive: OSError, EOFError, zlib.error, zstandard.ZstdError
        raise ConfigurationError(f"{path}: cannot be unpacked ({error}): the file is torn or no archive") from error


def count_lines(path: Path) -> int:
    """Lines of a file, a last one without an end counted."""
    count, last = 0, b"\n"
    with open_lines(path) as file:
        while block := _block(file, path):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def _block(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.read(1 << 20)
    except Exception as error:
        raise ConfigurationError(f"{path}: cannot be unpacked ({error}): the file is torn or no archive") from error


def decoded(line: bytes) -> str | None:
    """The text of a line without its end and outer blanks; None if it is not UTF-8."""
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
