"""Tests that the proof on GPUs runs as a whole, without a GPU, and goes on where it was interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import outcome, read, run_here, wanted
from benchmarks.gpu.part import Part, Site
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import DONE, FAILED, LATE, SKIPPED, Record, Records

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(2)
@pytest.mark.timeout(2200)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--seconds", "2000"]
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=2100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Records(output).of
    assert {name: record.status for name, record in found.items()} == {part.name: DONE for part in PARTS}
    assert all(record.rows for record in found.values())
    assert output.with_suffix(".md").read_text().count("**passed**") == len(PARTS)


def test_a_part_that_ends_early_is_told_with_its_reason() -> None:
    assert outcome(0, [{"ok": True}], [], 9) == (DONE, "")
    assert outcome(0, [{"ok": True}, {"ok": False}], [], 9) == (FAILED, "1 of 2 checks are wrong")
    assert outcome(None, [{"ok": True}], [], 9) == (LATE, "killed after 9 s")
    assert outcome(3, [], ["needs two GPUs"], 9) == (SKIPPED, "needs two GPUs")
    assert outcome(1, [], ["Traceback", "ValueError: 7"], 9) == (FAILED, "Traceback\nValueError: 7")


def test_a_case_that_fails_ends_no_other(tmp_path: Path) -> None:
    def work(case: int) -> dict[str, object]:
        if case == 1:
            raise SystemExit("gpipe-train failed:\nValueError: 7")
        return {"what": case, "ok": True}

    rows = list(Site("exact", "cpu", True, tmp_path).side_by_side(work, [0, 1, 2]))
    assert [row["ok"] for row in rows] == [True, False, True] and rows[1]["why"] == "ValueError: 7"


def test_a_part_writes_each_row_as_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"

    def find(part: Part, site: Site) -> object:
        yield {"what": "first"}
        assert rows.read_text() == '{"what": "first"}\n'
        raise ValueError("7")

    monkeypatch.setattr(Part, "find", find)
    with pytest.raises(ValueError, match="7"):
        run_here(PARTS[0], read(["machine", "--device", "cpu", "--rows", str(rows)]))
    assert rows.read_text() == '{"what": "first"}\n'


def test_a_second_call_goes_on_with_what_is_open(tmp_path: Path) -> None:
    records = Records(tmp_path / "gpu.json")
    for part, status in zip(PARTS, (DONE, FAILED, SKIPPED, LATE), strict=False):
        records.keep(part.name, Record(status, "CPU", torch.__version__, "2026-11-23", 1.0))
    again = Records(tmp_path / "gpu.json")
    names = [part.name for part in PARTS]
    open_parts = [part.name for part in wanted([], again, "CPU")]
    assert open_parts == [*names[4:], names[1], names[3]]  # never tried first, then those that failed
    assert [part.name for part in wanted([], again, "1 × NVIDIA H100")] == [*names[4:], *names[:4]]
    assert [part.name for part in wanted(["bits"], again, "CPU")] == ["bits"]
