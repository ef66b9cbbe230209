"""Divides pieces of text into documents, and finds the lines that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..defects import KINDS, Defect, Defects
from ..packed import BYTE_ORDER_MARK, decoded, has_records
from ..records import texts_in
from . import files
from .files import TextPiece

MOST_DOCUMENT = 2**20  # characters of a document of plain text; a longer one is divided
TEXT = "text"  # stands for the language in `Defect`
Ends = Literal["blank_line", "line"]
SEPARATORS = {"blank_line": (b"\n\n", b"\n"), "line": (b"\n",)}


class Document(NamedTuple):
    """Holds a text, and the number of its first line."""

    line: int
    text: str


def documents(piece: TextPiece, ends: str, key: str, defects: Defects) -> Iterator[Document]:
    """Yields the documents of a piece.

    Args:
        ends: what ends a document of plain text, see `Ends`. A record is a document.
        key: of the text in a record.
        defects: gets what cannot be used.
    """
    if has_records(piece.file):
        for number, line in _lines(piece, defects):
            if not line:
                continue
            try:
                (text,) = texts_in(line, [key], "data.json_key")
            except ValueError as error:
                defects.add(_defect(piece, number, "malformed", str(error)))
                continue
            if text.strip():
                yield Document(number, text)
            else:
                defects.add(_defect(piece, number, "empty", "has an empty text"))
        return
    held, size, first = list[str](), 0, piece.first
    for number, line_text in _lines(piece, defects):
        if held and (not line_text or ends == "line" or size + len(line_text) > MOST_DOCUMENT):
            yield Document(first, "\n".join(held))
            held, size = [], 0
        if line_text:
            first = first if held else number
            held.append(line_text)
            size += len(line_text) + 1
    if held:
        yield Document(first, "\n".join(held))


def _lines(piece: TextPiece, defects: Defects) -> Iterator[Document]:
    """Yields the lines that can be read, without blanks at their ends."""
    for number, line in enumerate(piece.content.split(b"\n"), start=piece.first):
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
            defects.add(_defect(piece, number, "byte_order_mark"))
        if len(line) > files.MOST_LINE:
            defects.add(_defect(piece, number, "too_long", f"has more than {files.MOST_LINE:,} bytes"))
            continue
        text, wrong = decoded(line)
        if wrong:
            defects.add(_defect(piece, number, wrong))
        else:
            yield Document(number, text.rstrip())


def _defect(piece: TextPiece, line: int, kind: str, found: str | None = None) -> Defect:
    return Defect(kind, TEXT, str(piece.file), line, found or KINDS[kind])
