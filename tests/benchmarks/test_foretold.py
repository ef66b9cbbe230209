"""Compares the planner's simulation of a step with real steps of real workers whose layers sleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ATTEMPTS = 3  # what else the machine does in a second shows in the bubble


def rows(output: Path) -> list[dict[str, Any]]:
    """Returns the rows of each schedule with two workers and four micro-batches; a forward takes some 20 ms."""
    command = [sys.executable, "-m", "benchmarks.emulated", "--K", "2", "--M", "4", "--seconds", "0.5"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, timeout=200, check=True)
    found: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return found


def misses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows whose bubble is two points away from the planned one, or whose cells take 10 % more or less."""
    return [row for row in rows if abs(row["bubble"] - row["planned"]) > 0.02 or abs(row["cells"] - 1) > 0.1]


@pytest.mark.slow
@pytest.mark.alone
def test_bubble_and_cell_times_of_every_schedule_are_foretold(tmp_path: Path) -> None:
    found = rows(tmp_path / "1.json")
    assert {row["schedule"] for row in found} == {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"}
    wrong = misses(found)
    for attempt in range(2, ATTEMPTS + 1):
        if wrong:
            again = {(row["remat"], row["schedule"]): row for row in misses(rows(tmp_path / f"{attempt}.json"))}
            wrong = [again[key] for row in wrong if (key := (row["remat"], row["schedule"])) in again]
    assert not wrong
