"""Finds text files, reads them in pieces of whole lines, and divides these into documents."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from ...errors import ConfigurationError
from ..defects import KINDS, Defect, Defects
from ..lines import (
    BYTE_ORDER_MARK,
    JSON,
    PACKED,
    PARQUET,
    decoded,
    ending_of,
    has_records,
    reading,
    split_of,
    texts_in,
    unpacked,
)
from ..tree import by_ending, files_below, files_matching, refuse_dead_links

log = logging.getLogger(__name__)

PLAIN = (".txt", ".text", ".md")
ABOUT = re.compile("(?i:readme|licen[cs]e|copying|notice)(?:[._-].*)?")  # files about a set, which are no text of it
MOST_LINE = 2**23  # bytes; a longer line is dropped
MOST_DOCUMENT = 2**20  # characters of a document of plain text; a longer one is divided
TEXT = "text"  # stands for the language in `Defect`
Ends = Literal["blank_line", "line", "file"]
SEPARATORS = {"blank_line": (b"\n\n", b"\n"), "line": (b"\n",), "file": (b"\n",)}


class TextPiece(NamedTuple):
    """Holds consecutive lines of a file, as bytes; `first` is the number of the first one, from 1."""

    file: Path
    number: int
    first: int
    content: bytes


class Document(NamedTuple):
    """Holds a text, and the number of its first line."""

    line: int
    text: str


def find_texts(root: str | None, key: str, pattern: str | None = None) -> dict[str, list[Path]]:
    """Returns the files of each split under a folder, in the order of their names, or the one file that is named.

    Warns of files that are passed over. Where a pattern finds no text to train on, all that it finds is.

    Args:
        key: the key that holds `root`; for messages.
        pattern: pattern of the files' paths from `root`; None: those with the endings of text.

    Raises:
        ConfigurationError: there is no text in it, or one twice.
    """
    place = Path(root or "").expanduser()
    refuse_dead_links([place])
    if place.is_file():
        return {"train": [place]}
    seen = [] if root is None or pattern is not None else [Path(file) for file in files_below(place, _is_text)]
    found = [path for path in seen if _is_text(path.name)] if pattern is None else files_matching(place / pattern)
    if others := [path.name for path in seen if not _is_text(path.name)]:
        about = [name for name in others if ABOUT.fullmatch(name)]
        which = ", ".join(
            filter(None, [in_short(about) if about else "", by_ending(name for name in others if name not in about)])
        )
        log.warning("%s: %d files are passed over (%s): data.files='**/*' reads all", root, len(others), which)
    if not found and pattern is not None:
        raise ConfigurationError(f"data.files={pattern}: there is no such file in {key}={root}")
    if not found:
        raise ConfigurationError(
            f"{key}={root}: there is no text. Expected a file, or a folder, of plain text ({', '.join(PLAIN)}) "
            f"or JSON lines ({', '.join(JSON)}), each may end in {', '.join(PACKED)} too, or Parquet ({PARQUET})"
        )
    found.sort(key=lambda path: os.path.relpath(path, place))  # a pattern may lead out of it
    known: dict[Path, Path] = {}
    for path in found:
        if (same := known.setdefault(unpacked(path.resolve()), path)) != path:
            raise ConfigurationError(f"{same} and {path} are one text twice: keep one of the two")
    splits = _divided(found, place)
    return splits if pattern is None or "train" in splits else {"train": found}


def _divided(found: Sequence[Path], place: Path) -> dict[str, list[Path]]:
    """Returns the files of each split. A file whose name says none is to train on.

    A file with another ending than a text's belongs to a split only if one is named train: of code, test.py is code.
    """
    named = {path: split_of(PurePath(os.path.relpath(path, place))) for path in found}
    has_train, splits = "train" in named.values(), dict[str, list[Path]]()
    for path, split in named.items():
        splits.setdefault(split if split and (has_train or _is_text(path.name)) else "train", []).append(path)
    return splits


def in_short(names: Sequence[str], most: int = 4) -> str:
    """Returns the first names and the number of the others: "a.txt, b.txt and 7 more"; "nothing" without any."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "nothing"


def _is_text(name: str) -> bool:
    return not ABOUT.fullmatch(name) and (ending_of(Path(name)) in PLAIN or has_records(Path(name)))


def read_text(path: Path, size: int, separators: Sequence[bytes]) -> Iterator[TextPiece]:
    """Yields a file in pieces of about `size` bytes that end at the end of a line.

    Args:
        separators: a piece ends after the last of the first of these that it has.
    """
    number, first, rest = 0, 1, b""
    with reading(path) as file:
        block = file.read(size)
        while block:
            text, block = rest + block, file.read(size)
            cut = next((end for mark in separators if (end := text.rfind(mark) + len(mark)) >= len(mark)), 0)
            cut = cut if block else len(text)
            rest = text[cut:]
            if cut:
                yield TextPiece(path, number, first, text[:cut])
                number, first = number + 1, first + text.count(b"\n", 0, cut)
            elif len(rest) > MOST_LINE:
                rest = rest[: MOST_LINE + 1]  # enough to see that it is too long


def documents(piece: TextPiece, ends: str, key: str, defects: Defects) -> Iterator[Document]:
    """Yields the documents of a piece.

    Args:
        ends: what ends a document of plain text, see `Ends`. A record is a document.
        key: name of the text in a record.
        defects: gets what cannot be used.
    """
    if has_records(piece.file):
        yield from _records(piece, key, defects)
        return
    held, size, first = list[str](), 0, piece.first
    for number, line in _lines(piece, defects):
        is_end = ends == "line" or (ends == "blank_line" and not line)
        if held and (is_end or size + len(line) > MOST_DOCUMENT):
            yield Document(first, "\n".join(held))
            held, size = [], 0
        if line or (held and ends == "file"):
            first = first if held else number
            held.append(line)
            size += len(line) + 1
    if held:
        yield Document(first, "\n".join(held).rstrip())


def _records(piece: TextPiece, key: str, defects: Defects) -> Iterator[Document]:
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


def _lines(piece: TextPiece, defects: Defects) -> Iterator[Document]:
    """Yields the lines that can be read, without blanks at their ends."""
    for number, line in enumerate(piece.content.split(b"\n"), start=piece.first):
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
            defects.add(_defect(piece, number, "byte_order_mark"))
        if len(line) > MOST_LINE:
            defects.add(_defect(piece, number, "too_long", f"has more than {MOST_LINE:,} bytes"))
            continue
        text, wrong = decoded(line)
        if wrong:
            defects.add(_defect(piece, number, wrong))
        else:
            yield Document(number, text.rstrip())


def _defect(piece: TextPiece, line: int, kind: str, found: str | None = None) -> Defect:
    return Defect(kind, TEXT, str(piece.file), line, found or KINDS[kind])
