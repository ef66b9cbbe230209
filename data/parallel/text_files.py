"""Reads pairs of lines from plain, gzip- and zstd-compressed files, and finds the lines that cannot be used."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from ...errors import ConfigurationError
from .defects import Defect, DefectCount
from .folders import PairFiles

LONGEST_PIECE = 16  # characters of a SentencePiece piece; with more than this per token a line is certainly too long
FOUND = {"undecodable": "is not UTF-8", "malformed": "has not exactly one tab", "empty": "is empty"}

_T = TypeVar("_T")


class Piece(NamedTuple):
    """Holds consecutive lines of a pair of files, as bytes.

    Attributes:
        number: of the piece within its files.
        first: the first line's number, from 1.
        targets: None for a TSV file.
    """

    files: PairFiles
    number: int
    first: int
    sources: list[bytes]
    targets: list[bytes] | None


class Line(NamedTuple):
    """Holds a pair of texts; `place` counts from the piece's first line."""

    place: int
    source: str
    target: str


def open_lines(path: Path) -> BinaryIO:
    """Opens a file for reading its uncompressed bytes.

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
    """Yields the lines in pieces of `size`, up to the end of the shorter file. Only "\\n" ends a line."""
    for number, lines in enumerate(_read(files, size)):
        yield Piece(files, number, number * size + 1, *lines)


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
    return _unpacked(path, lambda: list(islice(file, size)))


def _unpacked(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:  # a torn archive raises OSError, EOFError, zlib.error or zstandard.ZstdError
        raise ConfigurationError(f"{path}: cannot be unpacked ({error}): the file is torn or no archive") from error


def count_lines(path: Path) -> int:
    """Returns the number of lines of a file; a last one without a line feed counts."""
    count, last = 0, b"\n"
    with open_lines(path) as file:
        while block := _unpacked(path, lambda: file.read(1 << 20)):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def texts_of(piece: Piece, place: int) -> tuple[str, str] | str:
    """Returns both sides of a line, without blanks at their ends, or the kind of defect that makes it unreadable."""
    if piece.targets is not None:
        lines = [piece.sources[place], piece.targets[place]]
    else:
        lines = piece.sources[place].rstrip(b"\r\n").split(b"\t")
        if len(lines) != 2:
            return "malformed" if _decoded(piece.sources[place]) is not None else "undecodable"
    source, target = map(_decoded, lines)
    return "undecodable" if source is None or target is None else (source, target)


def _decoded(line: bytes) -> str | None:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def readable(piece: Piece, max_length: int) -> tuple[list[Line], DefectCount]:
    """Returns the lines that can be used, and the defects of the others."""
    usable, defects = [], DefectCount()
    for place in range(len(piece.sources)):
        texts = texts_of(piece, place)
        if isinstance(texts, str):
            side = int(piece.targets is not None and _decoded(piece.sources[place]) is not None)
            defects.add(defect_at(piece, place, texts, side, FOUND[texts]))
        elif not all(texts):
            side = texts.index("")
            defects.add(defect_at(piece, place, "empty", side, f"{('source', 'target')[side]} {FOUND['empty']}"))
        elif max(map(len, texts)) > max_length * LONGEST_PIECE:
            side = int(len(texts[1]) > len(texts[0]))
            defects.add(too_long(piece, place, side, f"{len(texts[side]):,} characters", max_length))
        else:
            usable.append(Line(place, *texts))
    return usable, defects


def defect_at(piece: Piece, place: int, kind: str, side: int, found: str) -> Defect:
    """Returns the defect of one line; `side` is 0 for the source, 1 for the target."""
    files = piece.files.files
    return Defect(kind, piece.files.language, str(files[min(side, len(files) - 1)]), piece.first + place, found)


def too_long(piece: Piece, place: int, side: int, length: str, max_length: int) -> Defect:
    """Returns the defect of a line that is too long on one side."""
    return defect_at(piece, place, "too_long", side, f"is too long: {length}, data.max_length={max_length} tokens")
