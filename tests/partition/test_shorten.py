"""Tests that the default cut is the one with the shortest simulated step, against all cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from composed import checked

from gpipe_cli.partition.cost import LayerTimes
from gpipe_cli.partition.cut import cut_by_time, step_seconds
from gpipe_cli.partition.shorten import GAIN
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import kept_graphs, schedule


def drawn(draw: random.Random) -> LayerTimes:
    """Draws the times of a layer; its backward in halves takes a little longer than the whole."""
    forward, backward, more = draw.uniform(1, 4), draw.uniform(2, 8), draw.uniform(1, 1.3)
    return LayerTimes(forward, forward, forward, backward, backward * more * 0.5, backward * more * 0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_has_a_much_shorter_step(kind: str, seed: int) -> None:
    times = list(map(drawn, [random.Random(seed)] * 10))
    K = 4 if kind == "interleaved_1f1b" else 2
    config = checked(f"pipeline.K={K}", "pipeline.workers=2", f"pipeline.schedule={kind}", "pipeline.M=4").settings
    sizes, placement = cut_by_time(times, config.pipeline, 2, {})
    lists = schedule(kind, placement, 4, kept_graphs(config.pipeline.policy, K, 4))
    ends = ([0, *inner, len(times)] for inner in combinations(range(1, len(times)), K - 1))
    every = ([stop - start for start, stop in pairwise(each)] for each in ends)
    best = min(step_seconds(times, each, placement, None, lists) for each in every)
    assert step_seconds(times, sizes, placement, None, lists) <= best * (1 + GAIN) ** 2
