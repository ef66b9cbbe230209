"""Tests that balanced workers, and the default cut made from them, are the best of all cuts."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from composed import checked

from gpipe_cli.partition.balance import NothingFits, Totals, balance, balance_rounds
from gpipe_cli.partition.cost import LayerTimes
from gpipe_cli.partition.cut import cut_by_time, step_seconds
from gpipe_cli.partition.partition import round_robin
from gpipe_cli.partition.shorten import GAIN
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import kept_graphs, schedule


def cuts(layers: int, cells: int) -> list[list[int]]:
    """Returns the sizes of all cuts."""
    ends = ([0, *inner, layers] for inner in combinations(range(1, layers), cells - 1))
    return [[stop - start for start, stop in pairwise(each)] for each in ends]


def loads(sizes: list[int], totals: list[Totals]) -> list[float]:
    """Returns the seconds of each worker; cell c lies on worker c mod W."""
    seconds, ends = [0.0] * len(totals), [0, *accumulate(sizes)]
    for cell, (start, stop) in enumerate(pairwise(ends)):
        own = totals[cell % len(totals)]
        seconds[cell % len(totals)] += float(own[stop] - own[start])
    return seconds


def drawn_totals(draw: random.Random, layers: int, workers: int) -> list[Totals]:
    """Draws seconds of every layer on every worker."""
    return [
        np.cumsum([0.0, *(draw.choice([0.5, 1, 1, 2, 7]) * draw.random() for _ in range(layers))])
        for _ in range(workers)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_faster_busiest_worker(seed: int) -> None:
    draw = random.Random(seed)
    layers, workers = draw.randint(4, 10), draw.randint(1, 4)
    totals = drawn_totals(draw, layers, workers)
    best = min(max(loads(sizes, totals)) for sizes in cuts(layers, workers))
    assert max(loads(balance(totals, [1] * workers, None, []), totals)) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_that_fits_has_a_faster_busiest_worker(seed: int) -> None:
    draw = random.Random(seed)
    layers, workers = draw.randint(4, 9), draw.randint(2, 4)
    totals, size = drawn_totals(draw, layers, workers), [draw.randint(1, 5) for _ in range(layers)]
    room = [draw.randint(sum(size) // workers, sum(size)) for _ in range(workers)]

    def bytes_(worker: int, start: int, stop: int) -> float:
        return float(sum(size[start:stop]))

    def fits(sizes: list[int]) -> bool:
        ends = [0, *accumulate(sizes)]
        return all(bytes_(w, a, b) <= room[w] for w, (a, b) in enumerate(pairwise(ends)))

    fitting = [sizes for sizes in cuts(layers, workers) if fits(sizes)]
    if not fitting:
        with pytest.raises(NothingFits):
            balance(totals, [1] * workers, bytes_, room)
        return
    found = balance(totals, [1] * workers, bytes_, room)
    assert fits(found)
    assert max(loads(found, totals)) == pytest.approx(min(max(loads(sizes, totals)) for sizes in fitting), rel=1e-9)


def test_the_other_workers_are_even_and_of_equal_cuts_the_later_worker_has_more() -> None:
    totals = [np.cumsum([0.0, 9.0, *[1.0] * 9])] * 4
    assert balance(totals, [1] * 4, None, []) == [1, 3, 3, 3]
    assert balance([np.arange(8.0)] * 3, [1] * 3, None, []) == [2, 2, 3]


def test_each_worker_has_as_many_layers_as_it_has_cells() -> None:
    assert balance([np.cumsum([0.0, 1.0, 1.0, 1.0, 9.0])] * 2, [1, 2], None, []) == [2, 2]


def test_a_step_of_cells_in_rounds_is_nearly_as_fast_as_with_any_cut() -> None:
    draw, over, placement = random.Random(0), [], round_robin(4, 2)
    lists = schedule("interleaved_1f1b", placement, 8, [8] * 4)
    for _ in range(30):
        total = drawn_totals(draw, 8, 1)[0]
        times = [LayerTimes(cost, cost, cost, 2 * cost, cost, cost) for cost in np.diff(total).tolist()]
        best = min(step_seconds(times, sizes, placement, None, lists) for sizes in cuts(8, 4))
        found = balance_rounds([total] * 2, 4, None, [])
        over.append(step_seconds(times, found, placement, None, lists) / best - 1)
    assert max(over) < 0.3 and sorted(over)[len(over) // 2] < 0.02, over


def drawn_times(draw: random.Random) -> LayerTimes:
    """Draws the times of a layer; its backward in halves takes a little longer than the whole."""
    forward, backward, more = draw.uniform(1, 4), draw.uniform(2, 8), draw.uniform(1, 1.3)
    return LayerTimes(forward, forward, forward, backward, backward * more * 0.5, backward * more * 0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_has_a_much_shorter_step(kind: str, seed: int) -> None:
    times = list(map(drawn_times, [random.Random(seed)] * 10))
    K = 4 if kind == "interleaved_1f1b" else 2
    config = checked(f"pipeline.K={K}", "pipeline.workers=2", f"pipeline.schedule={kind}", "pipeline.M=4").settings
    sizes, placement = cut_by_time(times, config.pipeline, 2, {})
    lists = schedule(kind, placement, 4, kept_graphs(config.pipeline.policy, K, 4))
    best = min(step_seconds(times, each, placement, None, lists) for each in cuts(10, K))
    assert step_seconds(times, sizes, placement, None, lists) <= best * (1 + GAIN) ** 2
