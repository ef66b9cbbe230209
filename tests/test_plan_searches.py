"""What plan.fit and plan.grow find, and what they say when there is nothing to be found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from test_plan import OWN
from torch import nn

from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.planner.answer import Answer
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search import REMAT_BY_SPEED, answer, micro_batch_counts

ELEVEN = (*OWN, "model.layers=11")  # 1, 2, 3, 4, 6 and 8 are tried first, and 11


def asked(*overrides: str) -> Answer:
    request = make_request(overrides)
    return answer(request.settings, request.options)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        asked(*overrides)
    return str(caught.value)


@pytest.fixture(scope="module")
def by_cells() -> dict[int, Plan]:
    """Of `ELEVEN`, by number of cells: of every M and remat the plan that needs least."""
    request = make_request(ELEVEN)
    planner, pipeline = Planner(request.settings, request.options), request.settings.pipeline
    plans: dict[int, Plan] = {}
    for K, M, remat in product(range(1, 12), micro_batch_counts(request.settings), REMAT_BY_SPEED):
        made = planner.plan(replace(pipeline, K=K, M=M, remat=remat))
        if K not in plans or made.memory < plans[K].memory:
            plans[K] = made
    return plans


# -- plan.grow ---------------------------------------------------------------------------------------------------------


def never_large(number: int = 1) -> list[Any]:
    """Of each number other weights, and always few."""
    return [LayerBuilder("layer", partial(nn.Linear, 64, 1 + number % 7))]


def test_growing_a_key_that_changes_nothing_in_memory_ends_and_says_so() -> None:
    said = refusal(*OWN, "pipeline.K=2", "plan.grow=schedule.warmup_steps")
    assert said.startswith("plan.grow=schedule.warmup_steps: from ")
    assert "it does not change what the devices hold: use a key" in said


def test_growing_a_key_of_which_no_value_is_too_large_ends_and_says_so() -> None:
    own = ("model._target_=test_plan_searches.never_large", *OWN[1:], "pipeline.K=1", "model.number=1")
    assert "all values up to 1099511627776 fit" in refusal(*own, "plan.grow=model.number")


# -- how many micro-batches are tried ----------------------------------------------------------------------------------

COUNTED_IN_TOKENS = ("data.batch_size=null", "data.batch_tokens=4096")  # typical targets are 16 wide: 320 pairs


def test_micro_batches_of_data_counted_in_tokens_go_as_far_as_its_sentences() -> None:
    request = make_request((*COUNTED_IN_TOKENS, "pipeline.K=1"))
    assert micro_batch_counts(request.settings)[-1] == 256
    assert micro_batch_counts(request.settings, longest=True)[-1] < 256


def test_the_paper_s_mini_batch_of_four_million_tokens_fits_one_gpu_in_many_micro_batches() -> None:
    words = ("experiment=nmt_t_6_8192_16", "plan.device=a100-40gb", "pipeline.remat=always")
    found = asked(*words, "pipeline.M=auto")
    assert found.plan.fits
    assert found.plan.M > 4


def test_what_is_too_large_is_named_as_it_was_given() -> None:
    said = refusal(*COUNTED_IN_TOKENS, "plan.fit=60MB", "plan.candidates=[1]")
    assert "a smaller data.batch_tokens" in said
    assert "data.batch_size" not in said


# -- plan.fit ----------------------------------------------------------------------------------------------------------


def test_fit_finds_the_fewest_cells_of_all_numbers_up_to_the_layers(by_cells: dict[int, Plan]) -> None:
    for K in (5, 7, 11):
        limit = by_cells[K].memory
        fewest = min(cells for cells, made in by_cells.items() if made.memory <= limit)
        found = asked(*ELEVEN, f"plan.fit={limit}").plan.K
        assert found == fewest


def test_the_nearest_is_what_needs_least_of_every_number_of_cells_and_micro_batches(
    by_cells: dict[int, Plan],
) -> None:
    nearest = min(by_cells.values(), key=lambda made: made.memory)
    said = refusal(*ELEVEN, "plan.fit=1KB")
    assert f"the nearest is {nearest.memory / 1e9:.4g} GB with pipeline.K={nearest.K} pipeline.M={nearest.M} " in said


def test_weights_that_are_too_large_are_not_to_be_mended_by_smaller_batches() -> None:
    said = refusal(*ELEVEN, "plan.fit=1KB")
    assert "weights, gradients and optimizer state alone are 6.657e-05 GB" in said  # of 64 · 65 numbers
    assert "batch_size" not in said
    assert "more cells" not in said  # there are no more layers


def test_activations_that_are_too_large_may_be_mended_by_smaller_batches(by_cells: dict[int, Plan]) -> None:
    said = refusal(*ELEVEN, f"plan.fit={by_cells[6].memory - 1}", "plan.candidates=[6]")
    assert "alone" not in said
    assert "use more cells, a smaller data.batch_size or a smaller model" in said


def test_candidates_that_are_all_more_than_the_layers_are_named() -> None:
    assert refusal(*OWN, "plan.fit=16GB", "plan.candidates=[500,600]") == (
        "plan.candidates=[500,600]: the model has 8 layers and every cell needs one, use numbers up to 8"
    )
