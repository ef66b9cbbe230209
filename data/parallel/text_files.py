"""Reads pairs of lines, and finds those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from ..defects import KINDS, Defect, Defects
from ..packed import BYTE_ORDER_MARK, decoded, reading
from ..records import texts_in
from .folders import PairFiles

LONGEST_PIECE = 16  # characters of a SentencePiece piece; with more than this per token a line is certainly too long


class Piece(NamedTuple):
    """Holds consecutive lines of a pair of files, as bytes.

    Attributes:
        number: of the piece within its language.
        first: the first line's number, from 1.
        rows: the columns of each line; two, unless a line of a TSV file is malformed; a record is one column.
    """

    files: PairFiles
    number: int
    first: int
    rows: list[Sequence[bytes]]


class Line(NamedTuple):
    """Holds a pair of texts; `place` counts from the piece's first line."""

    place: int
    source: str
    target: str


def read_pieces(files: PairFiles, size: int, numbers: Iterator[int] | None = None) -> Iterator[Piece]:
    """Yields the lines in pieces of ``size``, up to the end of the shorter file. Only "\\n" ends a line.

    Args:
        numbers: of the pieces; None: from 0.
    """
    numbers = count() if numbers is None else numbers
    rows: Iterator[Sequence[bytes]] = zip(*map(_lines, files.files), strict=False)
    if files.target is None and files.columns is None:
        rows = (line.rstrip(b"\r\n").split(b"\t") for (line,) in rows)
    for first in count(1, size):
        piece = list(islice(rows, size))
        if not piece:
            return
        yield Piece(files, next(numbers), first, piece)


def _lines(path: Path) -> Iterator[bytes]:
    with reading(path) as file:
        yield from file


def count_lines(path: Path) -> int:
    """Returns the number of lines of a file; a last one without a line feed counts."""
    count, last = 0, b"\n"
    with reading(path) as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def texts_of(piece: Piece, place: int) -> tuple[str, str] | Defect:
    """Returns both sides of a line, without blanks at their ends, or the defect that makes it unreadable."""
    texts = list[str]()
    for side, line in enumerate(piece.rows[place]):
        text, wrong = decoded(line.removeprefix(BYTE_ORDER_MARK))
        if wrong:
            return defect_at(piece, place, wrong, side)
        texts.append(text.strip())
    if piece.files.columns is not None:
        try:
            texts = [text.strip() for text in texts_in(texts[0], piece.files.columns, "data.columns")]
        except ValueError as error:
            return defect_at(piece, place, "malformed", 0, str(error))
        if any("\0" in text for text in texts):
            return defect_at(piece, place, "nul", 0)
    return (texts[0], texts[1]) if len(texts) == 2 else defect_at(piece, place, "malformed", 0)


def readable(piece: Piece, max_length: int) -> tuple[list[Line], Defects]:
    """Returns the lines that can be used, and the defects found: of the other lines, and byte order marks."""
    usable, defects = [], Defects()
    for place, sides in enumerate(piece.rows):
        texts = texts_of(piece, place)
        if isinstance(texts, Defect):
            defects.add(texts)
            continue
        for side, line in enumerate(sides):
            if line.startswith(BYTE_ORDER_MARK):
                defects.add(defect_at(piece, place, "byte_order_mark", side))
        if not all(texts):
            side = texts.index("")
            defects.add(defect_at(piece, place, "empty", side, f"{('source', 'target')[side]} {KINDS['empty']}"))
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
    return Defect(kind, piece.files.language, str(file), piece.first + place, found or KINDS[kind])


def too_long(piece: Piece, place: int, side: int, length: str, max_length: int) -> Defect:
    """Returns the defect of a line that is too long on one side."""
    return defect_at(
        piece, place, "too_long", side, f"{KINDS['too_long']}: {length}, data.max_length={max_length} tokens"
    )
