"""Writes metrics.jsonl, one JSON object per training step, and evaluations.jsonl, one per evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends a row per step; an evaluation after a step is added to that step's row.

    A row equal to the last one is not written again: a finished run that is resumed evaluates the same step again.

    Args:
        path: of the file; a resumed run appends to it.
        resumed_step: rows of later steps, from a run that was killed after its last checkpoint, are removed.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._last_line = _drop_later_rows(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._last: Mapping[str, Any] | None = None
        self._start = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the row of a step; it must have a key "step"."""
        line = json.dumps(json_safe(row))
        if line != self._last_line:
            self._start, self._last, self._last_line = self._file.tell(), row, line
            self._file.write(f"{line}\n")

    def join(self, more: Mapping[str, Any]) -> None:
        """Adds keys to the last row; does nothing before the first step of this process."""
        if self._last is None:
            return
        self._file.truncate(self._start)
        self._file.seek(0, os.SEEK_END)
        self._last_line = None
        self.write({**self._last, **more})

    def close(self) -> None:
        self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically. Unlike a checkpoint's files it may be lost when the machine crashes.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def json_safe(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def _drop_later_rows(path: Path, step: int) -> str | None:
    """Truncates the file behind ``step``, because a resumed run writes later steps again; removes a torn last row.

    Truncating is atomic, so a kill meanwhile loses nothing.

    Returns:
        The last row that is kept.
    """
    if not path.exists():
        return None
    last, end = None, 0
    with path.open("r+b") as file:
        for line in file:
            if not _is_row_up_to(step, line):
                break
            last, end = line.decode().rstrip("\n"), end + len(line)
        file.truncate(end)
    return last


def _is_row_up_to(step: int, line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
