"""Tests that divided workers, and the default cut made from them, are the best of all cuts."""

import random
from itertools import accumulate, combinations

import numpy as np
import pytest
from composed import checked

from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.partition.cost import LayerTimes
from gpipe_cli.partition.cutter import GAIN, MARGIN, Cutter, Memory, instruction_lists, step_seconds
from gpipe_cli.partition.partition import PartitionError, Places
from gpipe_cli.schedule.orders import KINDS


def cuts(layers: int, cells: int) -> Places:
    """Returns 0 and the ends of the cells of all cuts."""
    return np.array([(0, *inner, layers) for inner in combinations(range(1, layers), cells - 1)])


def of_cost(cost: float) -> LayerTimes:
    return LayerTimes(cost, cost, cost, 2 * cost, cost, cost)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 1e308])
def test_a_cost_that_is_no_number_is_refused(cost: float) -> None:
    config = checked("pipeline.K=2", "pipeline.workers=2").settings.pipeline
    with pytest.raises(PartitionError, match=r"the cost of layer 1 is .*: give a number from 0 to 1e\+301"):
        Cutter([of_cost(1), of_cost(cost)], config, 2, {})


def drawn_times(draw: random.Random) -> LayerTimes:
    """Draws the times of a layer; its backward in halves takes a little longer than the whole."""
    forward, backward, more = draw.uniform(1, 4), draw.uniform(2, 8), draw.uniform(1, 1.3)
    return LayerTimes(forward, forward, forward, backward, backward * more * 0.5, backward * more * 0.5)


@pytest.mark.parametrize("fitting", [False, True])
@pytest.mark.parametrize("seed", range(2))
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
