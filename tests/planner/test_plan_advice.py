"""Tests the better cut that a plan recommends, and the memory that it counts."""

from __future__ import annotations

import re

import pytest
from own_plan import OWN, planned

from gpipe_cli.commands.plan import main, make_request

UNEVEN = (*OWN, "pipeline.K=2", "pipeline.partition=[2,6]", "model.layers=8")


def test_an_uneven_cut_is_told_what_a_better_one_would_gain() -> None:
    made = planned(*UNEVEN)
    assert made.better_cut == [4, 4]
    assert made.better_cut_gain > 0.3


def test_with_several_cells_a_worker_the_slowest_worker_decides() -> None:
    """The slowest cell would have two layers instead of three, but each worker has four either way."""
    split = ("pipeline.K=4", "pipeline.partition=[1,3,3,1]", "model.layers=8")
    assert planned(*OWN, *split, "pipeline.workers=4").better_cut == [2, 2, 2, 2]
    assert planned(*OWN, *split, "pipeline.workers=2").better_cut is None


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
