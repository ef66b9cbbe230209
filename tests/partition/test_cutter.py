"""Tests that divided workers, and the default cut made from them, are the best of all cuts."""

import random
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from composed import checked

from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.partition.cost import LayerTimes
from gpipe_cli.partition.cutter import GAIN, MARGIN, Cutter, Memory, instruction_lists, step_seconds
from gpipe_cli.partition.partition import Floats, PartitionError, Places, divide
from gpipe_cli.schedule.orders import KINDS


def cuts(layers: int, cells: int) -> Places:
    """Returns 0 and the ends of the cells of all cuts."""
    return np.array([(0, *inner, layers) for inner in combinations(range(1, layers), cells - 1)])


def busiest(ends: Places, totals: list[Floats]) -> float:
    """Returns the seconds of the busiest worker."""
    return max(float(total[stop] - total[start]) for total, (start, stop) in zip(totals, pairwise(ends), strict=True))


@pytest.mark.parametrize("fitting", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_division_that_fits_has_a_faster_busiest_worker(seed: int, fitting: bool) -> None:
    draw = random.Random(seed)
    layers, workers = draw.randint(4, 9), draw.randint(1, 4)
    costs = [[draw.choice([0.5, 1, 1, 2, 7]) * draw.random() for _ in range(layers)] for _ in range(workers)]
    totals = [np.cumsum([0.0, *each]) for each in costs]
    last = [np.array(sorted(draw.choices(range(layers // 2, layers + 1), k=layers + 1))) for _ in range(workers)]
    possible = [
        ends
        for ends in cuts(layers, workers)
        if not fitting or all(stop <= last[w][start] for w, (start, stop) in enumerate(pairwise(ends)))
    ]
    found = divide(totals, [1] * workers, last if fitting else None)
    assert (found is None) == (not possible)
    if found is not None:
        assert busiest(found, totals) == pytest.approx(min(busiest(ends, totals) for ends in possible), rel=1e-9)


def test_the_other_workers_are_even() -> None:
    assert [*divide([np.cumsum([0.0, 9.0, *[1.0] * 9])] * 4, [1] * 4)] == [0, 1, 4, 7, 10]


def test_each_worker_has_as_many_layers_as_it_has_cells() -> None:
    assert [*divide([np.cumsum([0.0, 1.0, 1.0, 1.0, 9.0])] * 2, [1, 2])] == [0, 2, 4]


def of_cost(cost: float) -> LayerTimes:
    return LayerTimes(cost, cost, cost, 2 * cost, cost, cost)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 1e308])
def test_a_cost_that_is_no_number_is_refused(cost: float) -> None:
    config = checked("pipeline.K=2", "pipeline.workers=2").settings.pipeline
    with pytest.raises(PartitionError, match=r"the cost of layer 1 is .*: give a number from 0 to 1e\+301"):
        Cutter([of_cost(1), of_cost(cost)], config, 2, {})


@pytest.mark.parametrize("unit", [0, 1e-300, 1, 1e300])
def test_the_unit_of_costs_does_not_matter(unit: float) -> None:
    config = checked("pipeline.K=3", "pipeline.workers=3").settings.pipeline
    assert Cutter([of_cost(unit)] * 6, config, 3, {}).sizes() == [2, 2, 2]


def drawn_times(draw: random.Random) -> LayerTimes:
    """Draws the times of a layer; its backward in halves takes a little longer than the whole."""
    forward, backward, more = draw.uniform(1, 4), draw.uniform(2, 8), draw.uniform(1, 1.3)
    return LayerTimes(forward, forward, forward, backward, backward * more * 0.5, backward * more * 0.5)


@pytest.mark.parametrize("fitting", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_that_fits_has_a_much_shorter_step(kind: str, seed: int, fitting: bool) -> None:
    draw = random.Random(seed)
    times = list(map(drawn_times, [draw] * 10))
    K = 4 if kind in ROUND_ROBIN else 2
    config = checked(f"pipeline.K={K}", "pipeline.workers=2", f"pipeline.schedule={kind}", "pipeline.M=4").settings
    cutter, every = Cutter(times, config.pipeline, 2, {}), cuts(10, K)
    held = [0, *accumulate(draw.randint(1, 5) for _ in times)]
    memory = Memory(lambda worker, start, stop: held[stop] - held[start], [0.7 * held[-1], 0.5 * held[-1]])
    sizes = cutter.sizes(memory if fitting else None)
    if fitting:
        used = [sum(np.diff(np.array(held)[every])[:, worker::2].T) for worker in (0, 1)]
        fits = [(1 + MARGIN) * used[worker] <= memory.limits[worker] for worker in (0, 1)]
        every = every[fits[0] & fits[1]]
        assert [0, *accumulate(sizes)] in every.tolist()
    lists = instruction_lists(config.pipeline, cutter.placement)
    seconds = step_seconds(times, np.array([[0, *accumulate(sizes)], *every]), cutter.placement, None, lists)
    assert seconds[0] <= seconds.min() * ((1 + GAIN) ** 2 if not fitting else 1.05)
