"""Tests that every benchmark runs and writes its figures, at sizes too small to measure speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chosen import answers, gaps
from benchmarks.common import ROOT

SMALL = {
    "chosen": "real --quick",
    "emulated": "--K 2 --M 2 --seconds 0.02 --repetitions 1",
    "overhead": "--sizes tiny --repetitions 2",
    "plan": "--quick --overrides debug=tiny pipeline.K=1 pipeline.workers=1",
    "quality": "--quick --jobs transformer_lm_small",
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", SMALL)
def test_the_benchmark_prints_a_table_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *SMALL[name].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    assert figures["rows"]
    assert "\n|---|---" in done.stdout
    assert figures["machine"]["torch"]


def test_every_benchmark_is_tried() -> None:
    folder = ROOT / "benchmarks"
    scripts = {path.stem for path in folder.glob("*.py") if re.search(r"def main\(\)", path.read_text())}
    assert scripts == set(SMALL)


def test_no_chosen_pipeline_is_faster_than_its_bound_or_larger_than_memory() -> None:
    plans = list(answers(cases=3))
    assert all(plan.fits and plan.bound_of_any_cut_seconds is not None for plan in plans)
    assert all(plan.bound_of_any_cut_seconds <= plan.bound_seconds <= plan.step_seconds for plan in plans)
    assert sum(row["cases"] for row in gaps(plans)) == 3
