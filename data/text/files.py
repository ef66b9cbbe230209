"""Finds text files, and reads them in pieces of whole lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigurationError
from ..packed import PACKED, checked_start, ending_of, has_records, reading, unpacked, visible_files
from ..records import JSON, PARQUET, check_lines

PLAIN = (".txt", ".text", ".md")
KINDS = (
    f"plain text ({', '.join(PLAIN)}), JSON lines ({', '.join(JSON)}), each may end in {', '.join(PACKED)} too, or "
    f"Parquet ({PARQUET})"
)
MOST_LINE = 2**23  # bytes; a longer line is dropped
CHECKED = 2**20  # bytes at a file's beginning that are tried to be read as UTF-8
MOST_UNREADABLE = 0.01  # share of characters there that are no UTF-8


class TextPiece(NamedTuple):
    """Holds consecutive lines of a file, as bytes; `first` is the number of the first one, from 1."""

    file: Path
    number: int
    first: int
    content: bytes


def find_texts(root: str | None, key: str) -> list[Path]:
    """Returns the text files under a folder, in the order of their names, or the one file that is named.

    Args:
        key: the key that holds `root`; for messages.

    Raises:
        ConfigurationError: there is no such folder or file, or no text in it.
    """
    if root is None:
        raise ConfigurationError(f"{key} is not set: a file, or a folder of files of {KINDS}")
    place = Path(root).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigurationError(f"{key}={root}: there is no such file or folder")
    found = [path for path in visible_files(place) if ending_of(path) in PLAIN or has_records(path)]
    if not found:
        raise ConfigurationError(f"{key}={root} has no text. Expected files of {KINDS}")
    found.sort(key=lambda path: path.relative_to(place).as_posix())
    for one, other in pairwise(found):
        if unpacked(one) == unpacked(other):
            raise ConfigurationError(f"{one} and {other} are one text twice: keep one of the two")
    return found


def check_text(path: Path) -> None:
    """Raises ConfigurationError for a file that is empty, not text, not in UTF-8, or one JSON value over many lines."""
    text = checked_start(path, CHECKED).decode(errors="replace")
    if text.count("\ufffd") > 1 + MOST_UNREADABLE * len(text):
        raise ConfigurationError(
            f"{path} is no text in UTF-8: convert it, as iconv -f LATIN1 -t UTF-8 does if it is in Latin-1, or move it "
            "elsewhere if it is no text"
        )
    if has_records(path):
        check_lines(path, text)


def read_text(path: Path, size: int, separators: Sequence[bytes]) -> Iterator[TextPiece]:
    """Yields a file in pieces of about `size` bytes that end at the end of a line.

    Args:
        separators: a piece ends after the last of the first of these that it has.
    """
    number, first, rest = 0, 1, b""
    with reading(path) as file:
        while block := file.read(size):
            text = rest + block
            cut = next((end for mark in separators if (end := text.rfind(mark) + len(mark)) >= len(mark)), 0)
            rest = text[cut:]
            if cut:
                yield TextPiece(path, number, first, text[:cut])
                number, first = number + 1, first + text.count(b"\n", 0, cut)
            elif len(rest) > MOST_LINE:
                rest = rest[: MOST_LINE + 1]  # enough to see that it is too long
    if rest:
        yield TextPiece(path, number, first, rest)
