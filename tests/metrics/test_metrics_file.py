"""Tests metrics.jsonl: what other programs read of a run, step by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from composed import checked
from run_files import rows

from gpipe_cli.factory.build import build_task
from gpipe_cli.json_files import read_rows
from gpipe_cli.metrics.journal import Journal
from gpipe_cli.metrics.metrics_file import MetricsFile
from gpipe_cli.schedule.schedule import StepSchedule


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write({"step": 1, "loss": 0.5})
    file.write({"step": 2, "loss": math.nan})
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step"')
    file = MetricsFile(path, 2)
    file.write({"step": 3, "loss": 1.0})
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"\xff", b'{"step": 1}{"step": 2}'])
@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_row_is_named_and_the_rows_after_it_are_kept(damaged: bytes, place: int, tmp_path: Path) -> None:
    lines = [b'{"step": 1}', b'{"step": 2}', b'{"step": 3}']
    lines[place] = damaged
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    events: list[dict[str, Any]] = []
    settings = checked("logging.tensorboard=false").settings
    journal = Journal(tmp_path, events.append, settings, build_task(settings.task))
    journal.open(2, StepSchedule("gpipe", [0], "never"), [])
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert warnings == [f"{tmp_path}/metrics.jsonl: damaged and skipped: line {place + 1}"]
    kept, _ = read_rows(tmp_path / "metrics.jsonl")
    assert kept == [{"step": 2 - place}]
