"""Reads pairs of lines from plain, gzip- and zstd-compressed files, and finds the lines that cannot be used.

Neither a line without an end nor a file that unpacks without end can fill the memory.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from ...errors import ConfigurationError
from .defects import Defect, DefectCount
from .folders import PairFiles

LONGEST_PIECE = 16  # characters of a SentencePiece piece; with more than this per token a line is certainly too long
MOST_LINE = 2**22  # bytes that are kept of a line: more than any data.max_length allows
MOST_PIECE = 2**26  # bytes after which a piece ends
MOST_UNPACKED = 2**28  # bytes after which an archive is judged by how much it has grown
MOST_GROWTH = 200  # bytes from one packed byte; text grows ten times
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FOREIGN = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
FOUND = {
    "undecodable": "is not UTF-8",
    "nul": "has a NUL byte",
    "malformed": "has not exactly one tab",
    "empty": "is empty",
    "byte_order_mark": "begins with a byte order mark",
    "held_out": "is in the dev or test set, too",
    "copied": "has a source that equals its target",
}


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


class _Unpacked(io.RawIOBase):
    """Reads an archive's content, and refuses one that grows as no text does."""

    def __init__(self, archive: BinaryIO, path: Path) -> None:
        self._archive, self._path, self._read = archive, path, 0
        self._most = max(MOST_UNPACKED, MOST_GROWTH * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # the base class takes any buffer
        count: int = self._archive.readinto(buffer)  # type: ignore[attr-defined] # both kinds of archive have it
        self._read += count
        if self._read > self._most:
            raise ConfigurationError(
                f"{self._path} unpacks to more than {MOST_GROWTH} times its size, which no text does: if it is one, "
                "unpack it yourself"
            )
        return count

    def close(self) -> None:
        self._archive.close()
        super().close()


def open_lines(path: Path) -> BinaryIO:
    """Opens a file for reading its uncompressed bytes.

    Raises:
        ConfigurationError: it cannot be opened.
    """
    try:
        if path.suffix == ".gz":
            return io.BufferedReader(_Unpacked(cast(BinaryIO, gzip.open(path, "rb")), path), 1 << 20)
        if path.suffix == ".zst":
            import zstandard

            reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
            return io.BufferedReader(_Unpacked(cast(BinaryIO, reader), path), 1 << 20)
        return path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from error


@contextmanager
def _read(path: Path) -> Iterator[BinaryIO]:
    """Yields the opened file.

    Raises:
        ConfigurationError: it cannot be opened or unpacked.
    """
    with open_lines(path) as file:
        try:
            yield file
        except ConfigurationError:
            raise
        except Exception as error:  # a torn archive raises OSError, EOFError, zlib.error or zstandard.ZstdError
            raise ConfigurationError(f"{path}: cannot be unpacked ({error}): the file is torn or no archive") from error


def check_encoding(path: Path) -> None:
    """Raises ConfigurationError for an empty file, and for one that begins as UTF-16 or UTF-32 text."""
    with _read(path) as file:
        start = file.read(4096)
    if not start:
        raise ConfigurationError(f"{path} is empty: put its text there, or remove the files of this language")
    encoding = next((name for mark, name in FOREIGN.items() if start.startswith(mark)), None)
    if encoding is None and 4 * start.count(0) > len(start):  # without a mark, half of the bytes of Latin letters
        encoding = "UTF-16"
    if encoding is not None:
        raise ConfigurationError(f"{path} is {encoding} text, not UTF-8: iconv -f {encoding} -t UTF-8 converts it")


def read_pieces(files: PairFiles, size: int) -> Iterator[Piece]:
    """Yields the lines in pieces, up to the end of the shorter file. Only "\\n" ends a line.

    A piece has ``size`` lines, or fewer where they are very long.
    """
    rows = zip(*map(_lines, files.files), strict=False)
    first = 1
    number = 0
    while piece := _take(rows, size):
        sides = list(map(list, zip(*piece, strict=True)))
        yield Piece(files, number, first, sides[0], sides[1] if len(sides) > 1 else None)
        first += len(piece)
        number += 1


def _take(rows: Iterator[tuple[bytes, ...]], size: int) -> list[tuple[bytes, ...]]:
    taken, held = [], 0
    for row in rows:
        taken.append(row)
        held += sum(map(len, row))
        if len(taken) == size or held >= MOST_PIECE:
            break
    return taken


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines; of a very long one its first `MOST_LINE` bytes, without half a character."""
    with _read(path) as file:
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(MOST_LINE)) and not rest.endswith(b"\n"):
                    pass
                line = line.decode(errors="ignore").encode()
            yield line


def count_lines(path: Path) -> int:
    """Returns the number of lines of a file; a last one without a line feed counts."""
    count, last = 0, b"\n"
    with _read(path) as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def texts_of(piece: Piece, place: int) -> tuple[str, str] | Defect:
    """Returns both sides of a line, without blanks at their ends, or the defect that makes it unreadable."""
    sides, texts = _sides(piece, place), list[str]()
    for side, line in enumerate(sides):
        text = _decoded(line)
        if text is None:
            return defect_at(piece, place, "undecodable", side)
        if "\0" in text:
            return defect_at(piece, place, "nul", side)
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) == 2 else defect_at(piece, place, "malformed", 0)


def _sides(piece: Piece, place: int) -> list[bytes]:
    """Returns the line's columns; two, unless it is malformed."""
    if piece.targets is not None:
        return [piece.sources[place], piece.targets[place]]
    return piece.sources[place].rstrip(b"\r\n").split(b"\t")


def _decoded(line: bytes) -> str | None:
    try:
        return line.removeprefix(BYTE_ORDER_MARK).decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def readable(piece: Piece, max_length: int) -> tuple[list[Line], DefectCount]:
    """Returns the lines that can be used, and the defects found: of the other lines, and byte order marks."""
    usable, defects = [], DefectCount()
    for place in range(len(piece.sources)):
        texts = texts_of(piece, place)
        if isinstance(texts, Defect):
            defects.add(texts)
            continue
        for side, line in enumerate(_sides(piece, place)):
            if line.startswith(BYTE_ORDER_MARK):
                defects.add(defect_at(piece, place, "byte_order_mark", side))
        if not all(texts):
            side = texts.index("")
            defects.add(defect_at(piece, place, "empty", side, f"{('source', 'target')[side]} {FOUND['empty']}"))
        elif max(map(len, texts)) > max_length * LONGEST_PIECE:
            side = int(len(texts[1]) > len(texts[0]))
            defects.add(too_long(piece, place, side, f"{len(texts[side]):,} characters", max_length))
        else:
            usable.append(Line(place, *texts))
    return usable, defects


def defect_at(piece: Piece, place: int, kind: str, side: int, found: str | None = None) -> Defect:
    """Returns the defect of one line; `side` is 0 for the source, 1 for the target."""
    files = piece.files.files
    file = files[min(side, len(files) - 1)]
    return Defect(kind, piece.files.language, str(file), piece.first + place, found or FOUND[kind])


def too_long(piece: Piece, place: int, side: int, length: str, max_length: int) -> Defect:
    """Returns the defect of a line that is too long on one side."""
    return defect_at(piece, place, "too_long", side, f"is too long: {length}, data.max_length={max_length} tokens")
