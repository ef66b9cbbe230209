"""Every benchmark runs and writes its figures, at sizes that say nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = {
    "emulated": "--K 2 --M 2 --seconds 0.02 --repetitions 1",
    "two_workers": "--M 2 --width 16 --layers 2 --examples 4 --repetitions 2",
    "overhead": "--sizes tiny --examples 4 --tokens 4 --repetitions 2",
    "memory": "--K 2 --M 2 --examples 4",
    "startup": "--K 1 --quick debug=tiny",
    "exchange": "--workers 2 --rounds 10",
    "meter": "--shapes 2,2 --examples 4 --tokens 4 --repetitions 2",
    "plan": "--quick debug=tiny",
    "corpus": "--quick --tokens 20000 --batches 2",
}


@pytest.mark.parametrize("name", SMALL)
def test_the_benchmark_prints_a_table_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *SMALL[name].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    assert figures["rows"]
    assert "|" + "---|" * done.stdout.splitlines()[3].count(" | ") in done.stdout
    assert figures["machine"]["torch"]


def test_every_benchmark_is_tried() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text()}
    assert scripts == set(SMALL)


def test_memory_kept_with_rematerialization_is_what_the_paper_promises(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--K", "2", "--M", "4", "--examples", "16"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, timeout=200, check=True)
    for row in json.loads(output.read_text())["rows"]:
        assert row["ratio"] < 1.2, row
