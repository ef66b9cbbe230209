"""Writes metrics.jsonl, one JSON object per training step, and evaluations.jsonl, one per evaluation."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..disk import open_for_writing, writing


class MetricsFile:
    """Appends a row per step.

    A row equal to the last one is not written again: a finished run that is resumed evaluates the same step again.
    Rows that cannot be written stay in memory, and are written with the next one as soon as there is room.

    Args:
        path: of the file; a resumed run appends to it. It may not be a symbolic link.
        resumed_step: rows of later steps, from a run that was killed after its last checkpoint, are removed.

    Raises:
        DiskError: by every method, where the file cannot be written.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        self._pending: list[bytes] = []
        self._cut: int | None = None  # where the file ends in a part of a row, which is to be written again
        with writing(path):
            self._last_line = _drop_later_rows(path, resumed_step)
            self._file = _open(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the row of a step; it must have a key "step"."""
        line = json.dumps(json_safe(row))
        if line != self._last_line:
            self._last_line = line
            self._pending.append(f"{line}\n".encode())
            self._write_pending()

    def close(self) -> None:
        """Writes what is pending, and closes the file."""
        self._write_pending()
        self._file.close()

    def _write_pending(self) -> None:
        with writing(self.path):
            if os.fstat(self._file.fileno()).st_nlink == 0:  # the run directory was removed
                removed, self._file, self._cut = self._file, _open(self.path), None
                removed.close()
            while self._pending:
                if self._cut is not None:
                    self._file.truncate(self._cut)
                self._cut = self._file.seek(0, os.SEEK_END)
                _write_all(self._file, self._pending[0])
                self._cut = None
                self._pending.pop(0)


def _open(path: Path) -> io.FileIO:
    return io.FileIO(open_for_writing(path, os.O_RDWR | os.O_APPEND), "r+")


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Writes all bytes: of a nearly full disk, a system call writes as many as fit, and the next one fails."""
    while content:
        content = content[file.write(content) :]


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
    last, end = None, 0
    with _open(path) as raw, io.BufferedRandom(raw) as file:
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
