"""Reads records that hold texts: lines of JSON, and the rows of a Parquet file as lines of JSON."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

JSON, PARQUET = (".jsonl", ".ndjson", ".json"), ".parquet"
ROWS = 1_024  # of a Parquet file, read at once
INSTALL = "pip install 'gpipe-cli[parquet]'"


class ParquetLines(io.RawIOBase):
    """Gives each row's columns of text as a line of JSON, so that a row's number is a line's.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigurationError(f"{path} is read by the pyarrow library: {INSTALL}") from error
        file = parquet.ParquetFile(path)
        texts = [column.name for column in file.schema_arrow if "string" in str(column.type)]  # structures of texts too
        batches = file.iter_batches(ROWS, columns=texts, use_threads=False)  # there is a process for each core
        rows = (row for batch in batches for row in batch.to_pylist())
        self._lines = (json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in rows)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer; returns how many bytes it got, 0 at the end."""
        parts, size = [self._rest], len(self._rest)
        while size < len(buffer) and (line := next(self._lines, b"")):
            parts.append(line)
            size += len(line)
        content = b"".join(parts)
        given, self._rest = content[: len(buffer)], content[len(buffer) :]
        buffer[: len(given)] = given
        return len(given)


def texts_in(line: str, names: Sequence[str], key: str) -> list[str]:
    """Returns the texts of these names in a line of JSON, or below its "translation".

    Args:
        key: that chooses the names; for messages.

    Raises:
        ValueError: it says what is wrong with the line.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("is no JSON object")
    below = content.get("translation")
    content = {**(below if isinstance(below, dict) else {}), **content}
    for name in names:
        if not isinstance(content.get(name), str):
            known = ", ".join(name for name, value in content.items() if isinstance(value, str))
            raise ValueError(f"has no text under {name!r} ({key}), only under: {known or 'nothing'}")
        content[name].encode()  # a UnicodeEncodeError is a ValueError: half of a surrogate pair, which JSON can write
    return [content[name] for name in names]


def check_lines(path: Path, start: str) -> None:
    """Raises ConfigurationError for a file whose beginning shows one JSON value over all lines."""
    if found := re.match(r"\ufeff?\s*(\[\s*\{|\{[^\S\n]*\n)", start):
        kind, each = ("array", ".[]") if found[1].startswith("[") else ("object over several lines", ".")
        raise ConfigurationError(
            f"{path} is one JSON {kind}, not JSON lines (an object a line): put what jq -c '{each}' makes of it in its "
            "place"
        )
