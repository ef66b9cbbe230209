"""Tests what plan.fit and plan.grow find, and their errors when there is nothing to find."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from own_plan import OWN, planned
from torch import nn

from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search.search import REMAT_BY_SPEED, find_plan, micro_batch_counts

ELEVEN = (*OWN, "model.layers=11", "data.batch_size=8")  # 1, 2, 3, 4, 6 and 8 are tried first, and 11


def asked(*overrides: str) -> Plan:
    request = make_request(overrides)
    return find_plan(request.settings, request.options)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        asked(*overrides)
    return str(caught.value)


@pytest.fixture(scope="module")
def by_cells() -> dict[int, Plan]:
    """Returns for each number of cells the plan of `ELEVEN` with the least memory, of every M and remat."""
    request = make_request(ELEVEN)
    planner, pipeline = Planner(request.settings, request.options), request.settings.pipeline
    plans: dict[int, Plan] = {}
    for K, M, remat in product(range(1, 12), micro_batch_counts(request.settings), REMAT_BY_SPEED):
        made = planner.plan(replace(pipeline, K=K, M=M, remat=remat))
        if K not in plans or made.memory < plans[K].memory:
            plans[K] = made
    return plans


# -- plan.grow ---------------------------------------------------------------------------------------------------------


def wide(width: int, step: int = 1, most: int = 1 << 50) -> list[Any]:
    """Takes every ``step``th width up to a largest one."""
    if width % step or width > most:
        raise ValueError(f"width={width}: use a multiple of {step}, at most {most}")
    return [LayerBuilder("inner", partial(nn.Linear, 64, width)), LayerBuilder("outer", partial(nn.Linear, width, 64))]


def width_words(width: int, **others: int) -> tuple[str, ...]:
    given = [f"model.{name}={value}" for name, value in others.items()]
    target = "model._target_=test_plan_searches.wide"
    return (target, *OWN[1:], "pipeline.K=1", "plan.memory=1MB", f"model.width={width}", *given)


@pytest.mark.parametrize(("start", "step"), [(64, 32), (100, 32), (4000, 1), (1, 1)])
def test_grow_finds_the_largest_value_whatever_the_steps_of_the_model(start: int, step: int) -> None:
    found = asked(*width_words(start, step=step), "plan.grow=model.width").found["model.width"]
    assert planned(*width_words(found, step=step)).fits
    assert not planned(*width_words(found + step, step=step)).fits


@pytest.mark.parametrize(("start", "most"), [(64, 64), (7, 299)])
def test_a_key_of_which_all_larger_values_are_refused_grows_up_to_there(start: int, most: int) -> None:
    assert asked(*width_words(start, most=most), "plan.grow=model.width").found == {"model.width": most}


# -- plan.fit ----------------------------------------------------------------------------------------------------------


def test_fit_finds_the_fewest_cells_of_all_numbers_up_to_the_layers(by_cells: dict[int, Plan]) -> None:
    for K in (5, 7, 11):
        limit = by_cells[K].memory
        fewest = min(cells for cells, made in by_cells.items() if made.memory <= limit)
        found = asked(*ELEVEN, f"plan.fit={limit}").K
        assert found == fewest


def test_the_nearest_is_what_needs_least_of_every_number_of_cells_and_micro_batches(
    by_cells: dict[int, Plan],
) -> None:
    nearest = min(by_cells.values(), key=lambda made: made.memory)
    said = refusal(*ELEVEN, "plan.fit=1KB")
    assert f"the nearest is {nearest.memory / 1e9:.4g} GB with pipeline.K={nearest.K} pipeline.M={nearest.M} " in said
    assert "weights, gradients and optimizer state alone are 6.657e-05 GB" in said  # of 64 · 65 numbers
