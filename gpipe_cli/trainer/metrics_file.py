"""metrics.jsonl: one JSON object per training step; evaluations.jsonl: one per evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Rows are written when their step ends; an evaluation that follows a step joins that step's row.

    Args:
        path: of the file; a resumed run goes on in it.
        resumed_step: rows of later steps, from a run that was killed after its last checkpoint, are removed.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        _drop_later_rows(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._last: Mapping[str, Any] | None = None
        self._start = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """The row of a step; it has a key "step"."""
        self._start, self._last = self._file.tell(), row
        self._file.write(json.dumps(json_safe(row)) + "\n")

    def join(self, more: Mapping[str, Any]) -> None:
        """Adds to the last row; without one (before the first step of this process) nothing happens."""
        if self._last is None:
            return
        self._file.truncate(self._start)
        self._file.seek(0, os.SEEK_END)
        self.write({**self._last, **more})

    def close(self) -> None:
        self._file.close()


def json_safe(value: Any) -> Any:
    """JSON has no NaN or infinity; they become null, and every JSON reader stays happy."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def _drop_later_rows(path: Path, step: int) -> None:
    """A resumed run writes the steps after its checkpoint again; their first version goes, and a torn last row too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
