"""Tests that the README's picture comes from the command that docs/examples/sleeping_layers.py prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs" / "examples" / "sleeping_layers.py").read_text(encoding="utf-8")


@pytest.mark.slow(2)
def test_the_command_of_the_picture_draws_four_workers_and_their_bubble(tmp_path: Path) -> None:
    printed = re.search(r"PYTHONPATH=docs/examples gpipe-train (.*?)\n\n", EXAMPLE, re.DOTALL)
    assert printed is not None
    words = shlex.split(printed[1].replace("\\\n", " "))
    command = [sys.executable, "-m", "gpipe_cli.commands.train", *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'docs' / 'examples'}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "step"
    assert (run / "pictures" / "step.png").stat().st_size > 0
    # By the schedule at least 3/(8+3) of a step is bubble; recomputing while a worker waits makes it smaller.
    assert 0.15 < json.loads((run / "summary.json").read_text())["bubble_predicted"] < 0.3
