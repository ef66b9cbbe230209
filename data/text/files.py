"""Finds text files, reads them in pieces of whole lines, and divides these into documents."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ...errors import ConfigurationError
from ..defects import BadLine, Defects
from ..lines import JSON, PACKED, PARQUET, decoded, ending_of, has_records, reading, split_of, texts_in, unpacked
from ..tree import files_below, files_matching, in_short, refuse_dead_links

log = logging.getLogger(__name__)

PLAIN = (".txt", ".text", ".md")
ABOUT = re.compile("(?i:readme|licen[cs]e|copying|notice)(?:[._-].*)?")  # files about a set, which are no text of it
MOST_LINE = 2**23  # bytes; a longer line is dropped
MOST_DOCUMENT = 2**20  # characters of a document of plain text; a longer one is divided
Ends = Literal["blank_line", "line", "file"]
SEPARATORS = {"blank_line": (b"\n\n", b"\n"), "line": (b"\n",), "file": (b"\n",)}


class TextPiece(NamedTuple):
    """Holds consecutive lines of a file, as bytes; `first` is the number of the first one, from 1."""

    file: Path
    first: int
    content: bytes


def find_texts(root: str | None, key: str, pattern: str | None = None) -> dict[str, list[Path]]:
    """Returns the files of each split under a folder, in the order of their names, or the one file that is named.

    Warns of files that are passed over. If a pattern finds no file to train on, all that it finds are.

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
    if pattern is not None:
        found = files_matching(place / pattern)
        if not found:
            raise ConfigurationError(f"data.files={pattern}: there is no such file in {key}={root}")
    else:
        seen = [] if root is None else [Path(file) for file in files_below(place, _is_text)]
        found = [path for path in seen if _is_text(path.name)]
        if others := [path.name for path in seen if not _is_text(path.name)]:
            told = "%s: %d files are passed over (%s): data.files='**/*' reads all"
            log.warning(told, root, len(others), in_short(others))
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

    A file without a text's ending, as test.py, belongs to a split only if some file is named train: it may be code.
    """
    named = {path: split_of(Path(os.path.relpath(path, place)), anywhere=True) for path in found}
    if "train" not in named.values():  # words inside names are those of texts
        named = {path: split_of(Path(os.path.relpath(path, place))) for path in found}
    has_train, splits = "train" in named.values(), dict[str, list[Path]]()
    for path, split in named.items():
        splits.setdefault(split if split and (has_train or _is_text(path.name)) else "train", []).append(path)
    return splits


def _is_text(name: str) -> bool:
    return not ABOUT.fullmatch(name) and (ending_of(Path(name)) in PLAIN or has_records(Path(name)))


def read_text(path: Path, size: int, separators: Sequence[bytes]) -> Iterator[TextPiece]:
    """Yields a file in pieces of about `size` bytes that end at the end of a line.

    Args:
        separators: a piece ends behind the last place of a separator; of several, the first that it contains counts.
    """
    first, rest = 1, b""
    with reading(path) as file:
        block = file.read(size)
        while block:
            text, block = rest + block, file.read(size)
            cut = next((end for mark in separators if (end := text.rfind(mark) + len(mark)) >= len(mark)), 0)
            cut = cut if block else len(text)
            rest = text[cut:]
            if cut:
                yield TextPiece(path, first, text[:cut])
                first += text.count(b"\n", 0, cut)
            elif len(rest) > MOST_LINE:
                rest = rest[: MOST_LINE + 1]  # enough to see that it is too long


def documents(piece: TextPiece, ends: str, key: str, defects: Defects) -> Iterator[str]:
    """Yields the documents of a piece.

    Args:
        ends: end of a document of plain text, see `Ends`. A record is a document.
        key: name of the text in a record.
        defects: gets what cannot be used.
    """
    is_records = has_records(piece.file)
    held, size = list[str](), 0
    for number, raw in enumerate(piece.content.split(b"\n"), start=piece.first):
        try:
            if len(raw) > MOST_LINE:
                raise BadLine("too_long", f"has more than {MOST_LINE:,} bytes")
            line = decoded(raw).rstrip()
            if is_records and line:
                yield _record(line, key)
        except BadLine as bad:
            defects.add(bad.kind, f"{piece.file}, line {number}", bad)
            continue
        if is_records:
            continue
        is_end = ends == "line" or (ends == "blank_line" and not line)
        if held and (is_end or size + len(line) > MOST_DOCUMENT):
            yield "\n".join(held)
            held, size = [], 0
        if line or (held and ends == "file"):
            held.append(line)
            size += len(line) + 1
    if held:
        yield "\n".join(held).rstrip()


def _record(line: str, key: str) -> str:
    """Returns the text of a record.

    Raises:
        BadLine: it has none.
    """
    (text,) = texts_in(line, [key], "data.json_key")
    if not text.strip():
        raise BadLine("empty", "has an empty text")
    return text
