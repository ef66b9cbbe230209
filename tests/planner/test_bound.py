"""Holds the bounds on a step's time against the shortest steps that a search over all schedules finds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil, inf
from random import Random
from typing import Any

import pytest
from own_plan import OWN, planned
from shortest_step import CellLoad, ShortestStep

from gpipe_cli.benchmarks.tables.throughput import cost_durations
from gpipe_cli.commands.plan import make_request, report
from gpipe_cli.planner.bound import bound_of_any_cut, step_bound
from gpipe_cli.planner.planner import Planner
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import REMAT, most_kept, schedule
from gpipe_cli.schedule.simulate import simulate

SLACK = 1e-9  # of rounding
PLACEMENTS = [(0,), (0, 0), (0, 1), (1, 0), (0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)]
ALL = [
    (W, M, memory)
    for W, most in ((1, 4), (2, 6), (3, 4))
    for M in range(1, most + 1)
    for memory in range(1, min(W, M) + 1)
]
SMALL = [(W, M, memory) for W, M, memory in ALL if M <= 4 and W * M <= 8 and memory <= 2]


def even(v: int, graph: float = 1) -> CellLoad:
    """Returns one of v cells of a worker whose forward, backward and recompute together take 1, 2 and 1."""
    return CellLoad(1 / v, 1 / v, 1 / v, 2 / v, 1 / v, 1 / v, graph / v)


def drawn(random: Random, longest: int = 4, largest: int = 3) -> CellLoad:
    return CellLoad(*(random.randint(1, longest) for _ in range(6)), graph=random.randint(0, largest))


def bound(cells: Sequence[CellLoad], *others: Any) -> float:
    return step_bound(cells, [cell.graph for cell in cells], *others)


def any_cut(layers: Sequence[CellLoad], *others: Any) -> float:
    return bound_of_any_cut(layers, [layer.graph for layer in layers], *others)


# -- all schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_is_shorter_than_the_bounds(seed: int) -> None:
    random = Random(seed)
    placement = random.choice(PLACEMENTS)
    K, W, M = len(placement), max(placement) + 1, random.randint(1, 4 if len(placement) < 3 else 2)
    cells, memory = [drawn(random) for _ in range(K)], [random.randint(1, 6) for _ in range(W)]
    shortest = ShortestStep(cells, placement, M, memory).shortest()
    least = bound(cells, placement, M, memory)
    if shortest is None:
        assert least == inf
    else:
        assert least <= shortest + SLACK
        assert any_cut(cells, [1] * W, M, max(memory), sum(memory)) <= shortest + SLACK


@pytest.mark.parametrize(
    ("cases", "expected"),
    [pytest.param(SMALL, (11, 14), id="small"), pytest.param(ALL, (16, 24), id="every", marks=pytest.mark.slow(2))],
)
def test_most_bounds_of_even_cells_are_reached(cases: list[tuple[int, int, int]], expected: tuple[int, int]) -> None:
    reached = 0
    for W, M, memory in cases:
        cells, limits = [even(1)] * W, [memory] * W
        least = bound(cells, range(W), M, limits)
        shortest = ShortestStep(cells, range(W), M, limits).shortest()
        assert shortest is not None
        assert least <= shortest + SLACK
        reached += ceil(least - SLACK) == shortest
    assert (reached, len(cases)) == expected


@pytest.mark.parametrize(
    ("kind", "keep", "M", "graphs", "ours", "shortest"),
    [
        ("zero_bubble", (4, 4), 4, 2, 13, 13),
        ("zero_bubble", (3, 3, 3), 3, 3, 11, 11),
        ("1f1b", (0, 2, 1), 3, 2, 15, 12),
    ],
)
def test_the_best_kind_is_the_shortest_schedule_where_each_worker_has_room_for_w_graphs(
    kind: str, keep: tuple[int, ...], M: int, graphs: int, ours: int, shortest: int
) -> None:
    lists = schedule(kind, range(W := len(keep)), M, keep)
    assert max(sum(most_kept(each)[1].values()) for each in lists) <= graphs
    assert simulate(lists, range(W), cost_durations([1.0] * W)).span == ours
    assert ShortestStep([even(1)] * W, range(W), M, [graphs] * W).shortest() == shortest


# -- our schedules -----------------------------------------------------------------------------------------------------


def test_plans_take_at_least_their_bounds_in_the_memory_that_they_need() -> None:
    settings, options = make_request([*OWN, "pipeline.K=4", "pipeline.workers=2", "pipeline.M=8"])
    planner = Planner(settings, options)
    for kind, remat, speed in product(KINDS, REMAT, (1.0, 2.0)):
        devices = [{"speed": 1.0}, {"speed": speed}]
        pipeline = replace(settings.pipeline, schedule=kind, remat=remat, worker_devices=devices)
        planner.options = options
        planner.options = replace(options, memory=int(planner.plan(pipeline).memory))
        made = planner.plan(pipeline)
        assert made.fits
        assert made.bound_seconds is not None and made.bound_of_any_cut_seconds is not None
        assert made.bound_of_any_cut_seconds <= made.bound_seconds <= made.step_seconds * (1 + SLACK)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_any_cut_shares_the_work_and_waits_for_the_largest_layer() -> None:
    layers = [even(4)] * 16
    assert any_cut(layers, [1] * 4, 8, inf, inf) == 8 * 3 + (1 + 2 + 3) * 0.25 / 4
    assert any_cut([even(4), even(1), even(4)], [1, 1], 8, inf, inf) == 0.25 + 8 * 3
    assert any_cut(layers, [2, 1, 1], 8, inf, inf) == 4 * 8 * 3 / 2 + (0.5 + 2 * 0.5) * 0.25 / 2
    scarce = any_cut(layers, [1] * 4, 8, 1, 4)
    assert scarce > 8 * 3 + (1 + 2 + 3) * 0.25 / 4


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_tells_how_near_the_plan_is() -> None:
    made = planned(*OWN, "pipeline.K=1", "pipeline.remat=never")
    assert made.bound_seconds == pytest.approx(made.step_seconds)
    assert "(gap 0.0 %), of any cut" in report(made)
    short = planned(*OWN, "pipeline.K=2", "plan.memory=1KB")
    assert (short.bound_seconds, short.to_json()["bound_of_any_cut_seconds"]) == (None, None)
    assert "bound       no schedule fits, whatever the cut" in report(short)
