"""Tests that balancing gives the busiest worker the least to do, against a search of all cuts."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from gpipe_cli.partition.balance import NothingFits, Totals, balance


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
