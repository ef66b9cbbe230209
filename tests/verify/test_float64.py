"""Tests that gpipe-verify decides in float64 where the configured precision differs by more than rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.planted_faults.run import verified
from gpipe_cli.verify.plain import PlainModel


def test_float64_decides_what_is_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the plain loop's losses are made to differ by a thousandth."""
    run = PlainModel.run

    def rounded(plain: PlainModel, *arguments: Any) -> Any:
        step = run(plain, *arguments)
        if plain._settings.verify.dtype == "configured":
            step.losses = {place: loss * 1.001 for place, loss in step.losses.items()}
        return step

    monkeypatch.setattr(PlainModel, "run", rounded)
    report = verified(tmp_path)
    assert report["agrees"] and report["dtype"] == "float64"
    assert any("in float32 loss" in note and "in float64 they agree" in note for note in report["notes"])
    assert "in float64, K=4" in report["verdict"]


@pytest.mark.slow(2)
def test_synchronised_batchnorm_in_amoebanet_raises_no_alarm(tmp_path: Path) -> None:
    """An untrained AmoebaNet makes a whole difference of the rounding of its first layers."""
    words = ["debug=tiny", "model=amoebanet", "pipeline.sync_batchnorm=true", "pipeline.replicas=2", "pipeline.K=2"]
    line = [sys.executable, "-m", "gpipe_cli.commands.verify", *words, "pipeline.workers=1", "trainer.steps=1"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in float64 they agree" in done.stdout
