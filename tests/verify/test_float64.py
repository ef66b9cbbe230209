"""Tests that gpipe-verify decides in float64 where the configured precision differs by more than rounding."""

from __future__ import annotations

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
        if plain.settings.verify.dtype == "configured":
            step.losses = {place: loss * 1.001 for place, loss in step.losses.items()}
        return step

    monkeypatch.setattr(PlainModel, "run", rounded)
    report = verified(tmp_path)
    assert report["agrees"]
    assert any("in float32 loss" in note and "in float64 they agree" in note for note in report["notes"])
    assert "in float64, K=4" in report["verdict"]
