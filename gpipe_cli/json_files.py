"""Reads JSON files, each against a model of its content, and names the damaged file and the place in it.

A file may come from anywhere, and a crash may have left any bytes in it: only regular files are read.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from gpipe_cli.disk import NotRegular, open_regular, read_bytes
from gpipe_cli.errors import ConfigurationError, PlainError

T = TypeVar("T")
Numbers = dict[str, float | None]


class DamagedJson(ConfigurationError):
    """Raised for a file that does not fit its model; the message names the file and the place in it."""


def read_json(path: Path, kind: type[T]) -> T:
    """Returns the content of a file.

    Args:
        kind: type of the content: a dataclass, a TypedDict, ``dict[str, Any]``.

    Raises:
        DamagedJson: it holds something else, or is no regular file.
        FileNotFoundError: there is none.
        OSError: it cannot be read.
    """
    try:
        return parse_json(read_bytes(path), kind)
    except NotRegular as error:
        raise DamagedJson(f"{path} is damaged: {error.strerror}") from error
    except ValueError as error:
        raise DamagedJson(f"{path} is damaged: {error}") from error


def parse_json(content: bytes | str, kind: type[T]) -> T:
    """Returns the content of a JSON text; raises ValueError, which names the place that does not fit the model."""
    try:
        return cast(T, _reader(cast(Hashable, kind)).validate_json(content, strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


@cache
def _reader(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def json_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line with its JSON object; None where the line holds none, because it is damaged."""
    for line in lines:
        try:
            yield line, parse_json(line, dict[str, Any])
        except ValueError:
            yield line, None


def read_rows(path: Path, most: int = 1 << 40) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the objects of a file of JSON lines, and the numbers of its damaged lines; nothing without the file.

    Args:
        most: lines to read at the end of a longer file; about as many before them are read, too, spread evenly.
    """
    if not path.is_file():
        return [], []
    lines = path.read_bytes().splitlines()
    end = max(0, len(lines) - most)
    numbers = [*range(0, end, 1 + end // most), *range(end, len(lines))]
    found = [row for _, row in json_lines(lines[number] for number in numbers)]
    damaged = [1 + number for number, row in zip(numbers, found, strict=True) if row is None]
    return [row for row in found if row is not None], damaged


def json_rows(path: Path, kind: type[T]) -> Iterator[T]:
    """Yields the content of each line of a file of JSON lines.

    Raises:
        DamagedJson: one holds something else.
        PlainError: the file is gone.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError as error:
        raise PlainError(f"{path} was there and has been deleted: continue the run, which makes it anew") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                yield parse_json(line, kind)
            except ValueError as error:
                raise DamagedJson(f"{path}, line {number}, is damaged: {error}") from error


def skipped(path: Path, damaged: Sequence[int]) -> str:
    """Returns one line about the damaged lines of a file."""
    more = f" and {len(damaged) - 8} more" if len(damaged) > 8 else ""
    return f"{path}: damaged and skipped: line {', '.join(map(str, damaged[:8]))}{more}"
