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

    Args:
        path: the file; a resumed run appends to it. It may not be a symbolic link.
        resumed_step: rows of later steps, from a run that was killed after its last checkpoint, are removed.

    Raises:
        DiskError: the file cannot be written; every method raises it.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        with writing(path):
            _drop_later_rows(path, resumed_step)
            self._file = io.FileIO(open_for_writing(path), "a")

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the row of a step; it must have a key "step"."""
        with writing(self.path):
            self._file.write(f"{json.dumps(json_safe(row))}\n".encode())

    def close(self) -> None:
        self._file.close()


def json_safe(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    return to_jsonable_python(value, inf_nan_mode="null")


def _drop_later_rows(path: Path, step: int) -> None:
    """Truncates the file behind the last row up to ``step``, because a resumed run writes later steps again.

    Truncating is atomic, so a kill meanwhile loses nothing. Damaged lines before that row stay; `gpipe-report` names
    them.
    """
    end = place = 0
    with os.fdopen(open_for_writing(path), "r+b") as file:
        for line, row in json_lines(file):
            place += len(line)
            if row is not None and row["step"] <= step and line.endswith(b"\n"):
                end = place
        file.truncate(end)
