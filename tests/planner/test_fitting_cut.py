"""Tests that the cut which a run makes fits the memory of its workers, where any cut does."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from gpipe_cli.commands.plan import make_request
from gpipe_cli.factory.build import build_model
from gpipe_cli.factory.example import example_micro_batch
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.cutter import MARGIN
from gpipe_cli.partition.tie_search import find_ties
from gpipe_cli.planner.fitting_cut import cut_for_run
from gpipe_cli.planner.planner import Planner

WORDS = (
    "model=transformer_lm_small",
    "pipeline.K=2",
    "pipeline.workers=2",
    "pipeline.cost=flops",
    "plan.device=a10",
    "plan.kernels=cpu",
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_second_worker_gets_fewer_layers_where_its_memory_is_small(schedule: str) -> None:
    request = make_request((*WORDS, f"pipeline.schedule={schedule}"))
    settings = request.settings
    example, _ = example_micro_batch(settings, settings.pipeline.M, False)
    builders = build_model(settings.model)
    costs, ties = layer_costs(builders, example[0], "flops"), find_ties(builders)
    planner = Planner(settings, request.options)
    even = planner.plan()
    first, second = (cell.layers for cell in even.cells)
    fewer = planner.plan(replace(settings.pipeline, partition=[first + 2, second - 2]))
    assert fewer.workers_plan[1].total < even.workers_plan[1].total
    small = f"{fewer.workers_plan[1].total * (1 + MARGIN):.0f}"
    devices = replace(settings, pipeline=replace(settings.pipeline, devices=[{}, {"memory": small}]))
    cut = cut_for_run(builders, devices, example, inf, costs, ties)
    assert first < cut.sizes[0] <= first + 2
    planned = Planner(devices, request.options).plan()
    assert [cell.layers for cell in planned.cells] == cut.sizes and planned.fits
    assert cut_for_run(builders, settings, example, inf, costs, ties).sizes == [cell.layers for cell in even.cells]
