"""Tests that the proof on GPUs runs as a whole, without a GPU, and goes on where it was interrupted."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.gpu import checks
from benchmarks.gpu.__main__ import PARTS, open_parts
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
