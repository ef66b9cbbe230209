"""Tests that a sweep of gpipe-plan shows for each job what a plan of its own shows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from own_plan import OWN

from gpipe_cli.commands.plan import main

SMALL = (*OWN, "pipeline.K=2,4")


def table(printed: str) -> list[dict[str, str]]:
    """Returns the rows of a printed table by column; they are the last lines before any notes."""
    lines = printed.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("-"))
    ends = [0]
    for width in map(len, lines[rule].split("  ")):
        ends.append(ends[-1] + width + 2)
    rows = [line for line in lines[rule + 1 :] if not line.startswith("note")]
    cells = [[line[a:b].strip() for a, b in pairwise(ends)] for line in [lines[rule - 1], *rows]]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def alone(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "plan.format=json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_a_swept_key_that_was_looked_for_shows_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = alone(*OWN, "pipeline.M=auto", capsys=capsys)["found"]["pipeline.M"]
    assert main(["-m", *OWN, "pipeline.M=auto,8"]) == 0
    assert [row["M"] for row in table(capsys.readouterr().out)] == [str(found), "8"]


def test_a_picture_that_cannot_be_written_is_told_behind_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*OWN, f"plan.picture={tmp_path}/file/plan.svg"]) == 2
    said = capsys.readouterr()
    assert "memory" in said.out
    assert f"plan.picture={tmp_path}/file/plan.svg cannot be written (" in said.err


def test_a_schedule_without_a_formula_has_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pipeline.K=4", "pipeline.M=8", "pipeline.workers=2"]
    assert main(["-m", *OWN, *words, "pipeline.schedule=gpipe,interleaved_1f1b,zero_bubble"]) == 0
    assert [row["formula"] for row in table(capsys.readouterr().out)] == ["11.1 %", "5.9 %", "-"]
    assert main([*OWN, *words, "pipeline.schedule=interleaved_1f1b"]) == 0
    assert "simulated, 5.9 % by (W-1)/(vM+W-1)\n" in capsys.readouterr().out


def test_a_job_that_is_refused_keeps_its_row_and_the_others_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *OWN, "pipeline.K=2,4000,4"]) == 2
    printed = capsys.readouterr().out
    rows = table(printed.partition("\nrefusal")[0])
    assert [(row["K"], row["parameters"] != "-", row["step"] != "-") for row in rows] == [
        ("2", True, True),
        ("4000", False, False),
        ("4", True, True),
    ]
    assert printed.splitlines()[-1].startswith("refusal on pipeline.K=4000: ")
    assert "4000" in printed.splitlines()[-1].partition(": ")[2]
    assert main(["-m", *OWN, "pipeline.K=2,4000", "plan.format=json"]) == 2
    planned, refused = json.loads(capsys.readouterr().out)["plans"]
    assert planned["K"] == 2
    assert refused.keys() == {"overrides", "refused"}
    assert refused["overrides"][-2:] == ["pipeline.K=4000", "plan.format=json"]
