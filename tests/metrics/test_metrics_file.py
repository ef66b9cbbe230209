"""metrics.jsonl: what other programs read of a run, step by step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gpipe_cli.metrics.metrics_file import MetricsFile


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_joins_the_row_of_its_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.join({"evaluation": {"nll": 9.0}})  # before the first step: no row to join
    file.write({"step": 1, "loss": 0.5})
    file.join({"evaluation": {"nll": 1.0}})
    file.write({"step": 2, "loss": math.nan})
    file.join({"evaluation": {"nll": 0.5}})
    expected = [
        {"step": 1, "loss": 0.5, "evaluation": {"nll": 1.0}},
        {"step": 2, "loss": None, "evaluation": {"nll": 0.5}},
    ]
    assert rows(tmp_path / "m.jsonl") == expected


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step"')
    file = MetricsFile(path, 2)
    file.write({"step": 3, "loss": 1.0})
    file.join({"evaluation": {}})
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0, "evaluation": {}}]


def test_what_a_finished_run_finds_once_more_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "nll": 2.0}\n{"step": 2, "nll": 1.0}\n')
    file = MetricsFile(path, 2)
    file.write({"step": 2, "nll": 1.0})
    file.write({"step": 2, "nll": 0.5})
    assert rows(path) == [{"step": 0, "nll": 2.0}, {"step": 2, "nll": 1.0}, {"step": 2, "nll": 0.5}]


def test_a_row_that_is_joined_twice_by_the_same_stays(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write({"step": 1})
    for _ in range(2):
        file.join({"evaluation": {"nll": 1.0}})
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "evaluation": {"nll": 1.0}}]
