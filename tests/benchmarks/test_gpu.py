"""Tests that the proof on GPUs runs as a whole, without a GPU, and goes on where it was interrupted."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.common import ROOT, Row
from benchmarks.gpu import checks
from benchmarks.gpu.__main__ import PARTS, open_parts, read, run_apart
from benchmarks.gpu.checks import Site
from gpipe_cli.commands.plan import make_request
from gpipe_cli.factory.example import example_micro_batch


@pytest.mark.slow(2)
@pytest.mark.timeout(2200)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--tiny", "--seconds", "2000", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert {name: record["status"] for name, record in found.items()} == dict.fromkeys(PARTS, "passed")
    assert all(record["rows"] for record in found.values())
    assert output.with_suffix(".md").read_text().count("**passed**") == len(PARTS)


def test_a_part_that_fails_keeps_its_logs(tmp_path: Path) -> None:
    arguments = read(["--device", "cpu", "--tiny", "--output", str(tmp_path / "gpu.json")])
    record = run_apart("no such part", arguments, 60)
    assert record["status"] == "failed" and str(tmp_path / "gpu-logs") in record["why"]
    assert "the parts are" in (tmp_path / "gpu-logs/no such part/output").read_text()


def test_a_case_that_fails_ends_no_other(tmp_path: Path) -> None:
    def work(case: Sequence[str]) -> Row:
        if case == ["1"]:
            raise SystemExit("gpipe-train failed:\n  a line of code\nValueError: 7\nlog: /tmp/gone/rank_0.log\n")
        return {"what": case, "ok": True}

    rows = list(Site("exact", "cpu", True, tmp_path).side_by_side(work, [["0"], ["1"], ["2"]]))
    assert [row["ok"] for row in rows] == [True, False, True] and rows[1]["why"].endswith("\nValueError: 7")


@pytest.mark.parametrize(
    ("words", "shape"), [(checks.REAL_ATTENTION, (4, 512)), (checks.REAL_CONVOLUTIONS, (16, 3, 224, 224))]
)
def test_bits_are_compared_at_real_sizes(words: Sequence[str], shape: tuple[int, ...]) -> None:
    assert example_micro_batch(make_request(words).settings, 4, False)[0][0][0].shape == shape


def test_a_second_call_goes_on_with_what_is_open() -> None:
    names = list(PARTS)
    status = zip(names, ("passed", "failed", "not finished"), strict=False)
    records = {name: {"status": status, "where": "CPU", "torch": torch.__version__} for name, status in status}
    assert open_parts(records, "CPU") == [*names[3:], *names[1:3]]  # never tried first, then those that failed
    assert open_parts(records, "1 × NVIDIA H100") == [*names[3:], *names[:3]]
