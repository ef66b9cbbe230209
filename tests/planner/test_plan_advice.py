"""Tests the better cut that a plan recommends, and the memory that it counts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from own_plan import OWN, planned
from torch import nn

from gpipe_cli.commands.plan import main, make_request
from gpipe_cli.layers import LayerBuilder

UNEVEN = (*OWN, "pipeline.K=2", "pipeline.partition=[2,6]", "model.layers=8")


def tied_layers(first: int, second: int) -> list[Any]:
    """Returns eight equal layers, two of which share one module."""
    both = nn.Linear(64, 64)
    layers = [LayerBuilder(f"layer_{i}", partial(nn.Linear, 64, 64)) for i in range(8)]
    for index in (first, second):
        layers[index] = LayerBuilder(f"layer_{index}", lambda: both)
    return layers


def test_an_uneven_cut_is_told_what_a_better_one_would_gain() -> None:
    made = planned(*UNEVEN)
    assert made.better_cut == [4, 4]
    assert made.better_cut_gain > 0.3


def test_a_better_cut_may_separate_layers_that_share_a_weight() -> None:
    tied = ("model._target_=test_plan_advice.tied_layers", "model.first=3", "model.second=4")
    assert planned(*tied, *OWN[1:], "pipeline.K=2", "pipeline.partition=[2,6]").better_cut == [4, 4]


def test_with_several_cells_a_worker_the_slowest_worker_decides() -> None:
    """The slowest cell would have two layers instead of three, but each worker has four either way."""
    split = ("pipeline.K=4", "pipeline.partition=[1,3,3,1]", "model.layers=8")
    assert planned(*OWN, *split, "pipeline.workers=4").better_cut == [2, 2, 2, 2]
    assert planned(*OWN, *split, "pipeline.workers=2").better_cut is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_better_cut_makes_the_step_shorter_where_the_last_worker_recomputes_nothing(schedule: str) -> None:
    words = (*OWN, "pipeline.K=3", "model.layers=24", "pipeline.M=12", f"pipeline.schedule={schedule}")
    even = planned(*words, "pipeline.partition=[8,8,8]")
    if schedule == "gpipe":
        assert even.better_cut is None  # every worker recomputes as much
    else:
        assert even.better_cut is not None and even.better_cut[-1] > 8
        better = planned(*words, f"pipeline.partition={even.better_cut}".replace(" ", ""))
        assert better.better_cut is None
        assert better.step_seconds < even.step_seconds / 1.02


def test_a_search_over_cells_puts_aside_an_experiment_s_sizes() -> None:
    request = make_request([*OWN, "pipeline.K=2", "pipeline.partition=[1,5]", "plan.fit=1GB"])
    assert request.notes == ["plan.fit plans with pipeline.partition=min_max in place of [1, 5]"]
    assert request.settings.pipeline.partition == "min_max"


@pytest.mark.parametrize(("average", "told"), [("0.9", ", average"), ("null", "")])
def test_averaged_weights_are_named_where_they_are_counted(
    average: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*OWN, "pipeline.K=2", f"trainer.average={average}"]) == 0
    assert re.search(rf"\(weights, gradients, optimizer{told} \d", capsys.readouterr().out)
