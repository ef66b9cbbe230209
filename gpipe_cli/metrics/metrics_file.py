"""Writes metrics.jsonl, one JSON object per training step, and evaluations.jsonl, one per evaluation."""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from ..disk import open_for_writing, writing
from ..json_files import json_lines


class MetricsFile:
    """Appends a row per step.

    A row that finds no room is lost as a whole.

    Args:
        path: of the file; a resumed run appends to it. It may not be a symbolic link.
        resumed_step: rows of later steps, from a run that was killed after its last checkpoint, are removed.

    Attributes:
        damaged: numbers of the lines that hold no row; they stay, as the rows after them do.

    Raises:
        DiskError: by every method, where the file cannot be written.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        with writing(path):
            self.damaged = _drop_later_rows(path, resumed_step)
            self._file = io.FileIO(open_for_writing(path), "r+")

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the row of a step; it must have a key "step"."""
        with writing(self.path):
            _write_all(self._file, f"{json.dumps(json_safe(row))}\n".encode())

    def close(self) -> None:
        self._file.close()


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Appends all bytes or none: of a nearly full disk, a system call writes as many as fit, and the next one fails."""
    end = file.seek(0, os.SEEK_END)
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        file.truncate(end)
        raise


def json_safe(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    return to_jsonable_python(value, inf_nan_mode="null")


def _drop_later_rows(path: Path, step: int) -> list[int]:
    """Truncates the file behind the last row up to ``step``, because a resumed run writes later steps again.

    Truncating is atomic, so a kill meanwhile loses nothing.

    Returns:
        The numbers of damaged lines. A torn last one, as a kill leaves it, is none.
    """
    end = place = 0
    damaged: list[int] = []
    with os.fdopen(open_for_writing(path), "r+b") as file:
        for number, (line, row) in enumerate(json_lines(file), 1):
            place += len(line)
            if not line.endswith(b"\n"):
                break
            if row is None or not isinstance(row.get("step"), int):
                damaged.append(number)
            elif row["step"] <= step:
                end = place
        file.truncate(end)
    return damaged
