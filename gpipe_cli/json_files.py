"""Reads JSON files, each against a model of its content, and names the damaged file and the place in it.

A file may come from anywhere, and a crash may have left any bytes in it: only regular files are read, and only finite
numbers in them where nothing else is said.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import Required, TypedDict

from gpipe_cli.disk import NotRegular, open_regular, read_bytes
from gpipe_cli.errors import ConfigurationError, PlainError

T = TypeVar("T")
Numbers = dict[str, float | None]


class DamagedJson(ConfigurationError):
    """Raised for a file that does not fit its model; the message names the file and the place in it."""


class StepRow(TypedDict, total=False):
    """Describes a line of metrics.jsonl or evaluations.jsonl; the task's and the user's own numbers stand beside."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    step: Required[int]
    loss: float | None
    seconds: float | None
    bubble: float | None
    bubble_predicted: float | None
    examples_per_second: float | None
    waiting_for_data_share: float | None
    skipped_updates: int
    breakdown: Numbers
    cells: list[Numbers]
    workers: list[Numbers]
    samples: list[dict[str, str]]


def read_json(path: Path, kind: type[T], finite: bool = True) -> T:
    """Returns the content of a file.

    Args:
        kind: what the file holds: a dataclass, a TypedDict, ``dict[str, Any]``.
        finite: as in `parse_json`.

    Raises:
        DamagedJson: it holds something else, or is no regular file.
        FileNotFoundError: there is none.
        OSError: it cannot be read.
    """
    try:
        return parse_json(read_bytes(path), kind, finite)
    except NotRegular as error:
        raise DamagedJson(f"{path} is damaged: {error.strerror}") from error
    except ValueError as error:
        raise DamagedJson(f"{path} is damaged: {error}") from error


def parse_json(content: bytes | str, kind: type[T], finite: bool = True) -> T:
    """Returns the content of a JSON text; raises ValueError, which names the place that does not fit the model.

    Args:
        finite: refuses infinity and NaN, wherever `kind` itself would not.
    """
    from_json(content, allow_inf_nan=not finite)  # which validate_json takes anyway
    try:
        return cast(T, _reader(cast(Hashable, kind)).validate_json(content, strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


@cache
def _reader(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def json_lines(lines: Iterable[bytes], kind: Any = StepRow) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line with its JSON object; None where the line holds no `kind`, because it is damaged."""
    for line in lines:
        try:
            yield line, parse_json(line, kind)
        except ValueError:
            yield line, None


def read_rows(path: Path, kind: Any = StepRow) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the objects of a file of JSON lines, and the numbers of its damaged lines; none without the file."""
    if not path.is_file():
        return [], []
    with path.open("rb") as file:
        found = [row for _, row in json_lines(file, kind)]
    return [row for row in found if row is not None], [n for n, row in enumerate(found, 1) if row is None]


def json_rows(path: Path, kind: type[T]) -> Iterator[T]:
    """Yields the lines of a file.

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
