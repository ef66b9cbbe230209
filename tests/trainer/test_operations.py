"""Tests that a training step has no more operations than once counted: a GPU's host must start each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from inline_run import train_inline

from gpipe_cli.planner.measure.tracking import Tracker

MOST = {  # views are not counted
    "transformer": (("pipeline.K=13", "task.generation=null"), 2_050),
    "amoebanet": (("pipeline.K=4",), 11_300),
}


@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.slow) for model in MOST])
def test_a_step_has_few_operations(model: str, tmp_path: Path) -> None:
    words, most = MOST[model]
    counted = list[int]()
    common = ("debug=tiny", f"model={model}", "trainer.steps=3", "trainer.evaluate_first=false")
    with Tracker() as tracker:
        train_inline(
            *(tmp_path, *common, "trainer.evaluate_every=null", "checkpoint.every=null", *words),
            on_event=lambda event: counted.append(len(tracker.operations)) if event["kind"] == "progress" else None,
        )
    assert counted[2] - counted[1] <= most
