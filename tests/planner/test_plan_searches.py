"""Tests what searches for a pipeline find, and their errors when there is nothing to find."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
from own_plan import OWN, planned
from refusals import refusal_of

from gpipe_cli.commands.plan import main, make_request, words_of
from gpipe_cli.config import PipelineConfig
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search import Listener, find_plan, micro_batch_counts
from gpipe_cli.schedule.schedule import REMAT

ELEVEN = (*OWN, "model.layers=11", "data.batch_size=8")  # 1, 2, 3, 4, 6 and 8 are tried first, and 11


def asked(*overrides: str) -> Plan:
    return find_plan(*make_request(overrides))


refusal = partial(refusal_of, asked)


def typed_plans(*overrides: str, workers: Sequence[int], **others: Sequence[Any]) -> list[Plan]:
    """Makes the plan of every pipeline that a person could type: numbers of workers, kinds, M and words of remat."""
    request = make_request(overrides)
    planner, pipeline = Planner(request.settings, request.options), request.settings.pipeline
    spaces = {"M": micro_batch_counts(planner), "remat": REMAT, "schedule": ("gpipe", "1f1b", "zero_bubble"), **others}
    return [
        planner.plan(replace(pipeline, K=number, workers=number, **dict(zip(spaces, values, strict=True))))
        for number, values in product(workers, product(*spaces.values()))
    ]


# -- plan.fit ----------------------------------------------------------------------------------------------------------


def test_fit_finds_no_more_devices_than_any_pipeline_that_a_person_could_type() -> None:
    plans = typed_plans(*ELEVEN, workers=range(1, 12), schedule=["1f1b"])
    for devices in (5, 7, 11):
        limit = min(made.memory for made in plans if made.workers == devices)
        found = asked(*ELEVEN, f"plan.fit={limit}")
        assert found.memory <= limit
        assert found.workers <= min(made.workers for made in plans if made.memory <= limit)


def test_where_nothing_fits_the_nearest_is_named() -> None:
    said = refusal(*ELEVEN, "plan.fit=1KB")
    assert "nothing fits 1e-06 GB: the nearest is " in said and " GB with pipeline.K=11 pipeline.M=8 " in said
    assert "weights, gradients and optimizer state alone are 6.657e-05 GB" in said  # of 64 · 65 numbers


# -- plan.grow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [(), ("plan.best=true", "plan.devices=2")], ids=["as typed", "any pipeline"])
def test_grow_finds_the_largest_model_that_fits(free: tuple[str, ...]) -> None:
    words = (*OWN, "data.batch_size=8", "pipeline.K=2", "pipeline.M=2", "plan.memory=400KB")
    found = asked(*words, *free, "plan.grow=model.layers", "plan.grow_by=2")
    size = found.found["model.layers"]
    assert found.fits and size % 2 == 0 and sum(cell.layers for cell in found.cells) == size
    typed = words_of(found.found).split()
    assert planned(*words, *free, *typed).memory == found.memory
    larger = (*words, *free, f"model.layers={size + 2}")
    if free:
        assert "nothing fits" in refusal(*larger)
    else:
        assert not planned(*larger).fits


def test_a_growth_that_is_stopped_answers_with_the_largest_so_far() -> None:
    words = (*OWN, "data.batch_size=8", "pipeline.K=2", "pipeline.M=2", "model.layers=2", "plan.grow=model.layers")
    said: list[str] = []
    found = find_plan(*make_request(words), Listener(said.append, lambda: len(said) > 2))
    assert found.fits and found.found == {"model.layers": 8}  # after 2 and 4
    assert "stopped: the largest of the sizes so far" in found.notes


def test_what_cannot_grow_is_refused() -> None:
    assert "is no number of this model, which has model.layers" in refusal(*OWN, "plan.grow=model.depth")
    assert "nothing fits" in refusal(*OWN, "pipeline.K=1", "plan.memory=1KB", "plan.grow=model.layers")


# -- plan.best ---------------------------------------------------------------------------------------------------------

FOUR = (*OWN, "data.batch_size=16", "plan.devices=4", "plan.best=true", "model.layers=12")


def test_best_is_no_slower_than_any_pipeline_that_a_person_could_type() -> None:
    plans = typed_plans(*FOUR[:-2], FOUR[-1], workers=[4])
    for limit in (sorted(made.memory for made in plans)[len(plans) // 3], 1e9):
        found = asked(*FOUR, f"plan.memory={limit}")
        assert found.fits and found.workers * found.replicas == 4
        assert found.step_seconds <= min(made.step_seconds for made in plans if made.memory <= limit) * 1.000001
        assert [rival["step_seconds"] for rival in found.rivals] >= [found.step_seconds] * len(found.rivals)


def test_a_search_that_is_stopped_answers_with_the_best_so_far() -> None:
    said: list[str] = []
    found = find_plan(*make_request(FOUR), Listener(said.append, lambda: len(said) > 4))
    assert found.fits and "stopped: the best of the plans so far" in found.notes
    assert re.search(r"planned \d+ pipelines, \d+ left, best so far .* s; at most \d+ s more", said[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_a_plan(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelineConfig] = []

    def plan(planner: Planner, pipeline: PipelineConfig | None = None) -> Plan:
        made.append(cast(PipelineConfig, pipeline))
        if len(made) == 3:
            os.kill(os.getpid(), number)
        return plain(planner, pipeline)

    plain = Planner.plan
    monkeypatch.setattr(Planner, "plan", plan)
    assert main([*FOUR, "plan.memory=1GB"]) == 0
    assert len(made) < 10


def test_what_is_found_can_be_typed() -> None:
    found = asked(*FOUR, "plan.memory=300KB")
    typed = planned(*OWN, FOUR[-1], "data.batch_size=16", "plan.memory=300KB", *words_of(found.found).split())
    assert (typed.step_seconds, typed.memory) == (found.step_seconds, found.memory)


def test_a_batchnorm_has_two_examples_in_every_micro_batch() -> None:
    small = ("model=amoebanet", "debug=tiny", "data.batch_size=8", "plan.device=a10")
    assert asked(*small, "plan.best=true", "plan.devices=2").M in (1, 2, 4)


def test_a_plan_with_auto_keys_changes_no_other() -> None:
    words = ("pipeline=auto", "plan.devices=4", "model.layers=16", "pipeline.M=8")
    found = asked(*OWN, *words)
    assert (found.M, found.replicas, found.workers) == (8, 1, 4)
    assert {*found.found} >= {"pipeline.K", "pipeline.schedule", "pipeline.partition"}
    assert found.step_seconds < planned(*OWN, *words[2:], "pipeline.workers=4").step_seconds
    assert "type plan.devices=4" in refusal(*OWN, "pipeline.K=auto")
