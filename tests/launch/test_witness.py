"""Tests that the place of a rank that is killed is reported by the process beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_cli.launch.report import take_failure

RANK = """
import os, signal, subprocess, sys
from pathlib import Path
from gpipe_cli.launch.witness import Witness

with Witness(3) as witness:
    if len(sys.argv) > 2:
        witness.write_to(Path(sys.argv[2]))
    witness.where.step = 7
    witness.where.enter(1, 2, "backward")
    witness.where.layer = "encoder.3"
    if sys.argv[1] == "kill":
        subprocess.Popen(["sleep", "20"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # outlives the rank
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "exit":
        os._exit(4)
    if sys.argv[1] == "tell":
        witness.dismiss()
        os._exit(4)
"""
SAID = "worker 3 was killed, or ended without a report at step 7, cell 1, layer encoder.3, micro-batch 2, backward; its"


def end_of(*words: str) -> str:
    """Runs the rank; returns what was printed when it and its witness have ended."""
    path = {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, "-c", RANK, *words], stderr=subprocess.PIPE, text=True, env=path).stderr


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_its_place_is_printed_and_left_for_the_next_start(how: str, tmp_path: Path) -> None:
    assert end_of(how, str(tmp_path / "workers")).startswith(SAID)
    record = json.loads((tmp_path / "workers" / "error_3.json").read_text())
    assert "layer encoder.3" in record["place"]
    failure = take_failure(tmp_path / "workers")
    assert failure is not None and failure.cause == "worker 3 was killed, or ended without a report"
    assert failure.place == "step 7, cell 1, layer encoder.3, micro-batch 2, backward"


def test_the_error_file_of_another_release_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "error_0.json").write_text('{"message": "lost"}')
    assert take_failure(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_written_it_is_printed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "workers").touch()
    said = end_of("exit", str(tmp_path / "workers"))
    assert said.startswith(SAID) and "workers cannot be written: File exists" in said


@pytest.mark.parametrize("how", ["tell", "end in order"])
def test_a_rank_that_tells_its_own_end_is_not_reported(how: str, tmp_path: Path) -> None:
    assert end_of(how, str(tmp_path)) == ""
    assert list(tmp_path.iterdir()) == []
