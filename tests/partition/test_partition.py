"""Tests every cut against the best of all possible cuts, and that errors say what to type."""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from refusals import refusal_of

from gpipe_cli.partition.partition import PartitionError, cell_layers, partition

Costs = Sequence[float]
ROUNDED = 1 + Fraction(1, 10**12)


def every_cut(L: int, K: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, L), K - 1):
        ends = [0, *cuts, L]
        yield [end - start for start, end in pairwise(ends)]


def exact_cells(costs: Costs, sizes: Sequence[int]) -> list[Fraction]:
    return [sum((Fraction(costs[i]) for i in layers), Fraction(0)) for layers in cell_layers(sizes)]


def dearest(costs: Costs, sizes: Sequence[int]) -> Fraction:
    return max(exact_cells(costs, sizes))


def squares(costs: Costs, sizes: Sequence[int]) -> Fraction:
    return sum((cell * cell for cell in exact_cells(costs, sizes)), Fraction(0))


DRAWS: dict[str, Callable[[random.Random], float]] = {
    "small integers": lambda draw: draw.choice([0, 0, 1, 2, 3, 7]),
    "tenths": lambda draw: draw.randint(1, 9) / 10,
    "of every size": lambda draw: 10.0 ** draw.uniform(-9, 9),
}


def cases(kind: str) -> Iterator[tuple[list[float], int]]:
    draw = random.Random(f"cuts of {kind}")
    for _ in range(150):
        costs = [DRAWS[kind](draw) for _ in range(draw.randint(1, 10))]
        if any(costs):
            yield costs, draw.randint(1, len(costs))


@pytest.mark.parametrize("kind", DRAWS)
class TestAgainstAllCuts:
    def test_min_max_breaks_ties_by_variance(self, kind: str) -> None:
        for costs, K in cases(kind):
            best = min(dearest(costs, sizes) for sizes in every_cut(len(costs), K))
            least = min(squares(costs, s) for s in every_cut(len(costs), K) if dearest(costs, s) == best)
            found = partition(costs, K, "min_max")
            assert dearest(costs, found) <= best * ROUNDED and squares(costs, found) <= least * ROUNDED, (costs, K)

    def test_min_variance_finds_the_least_variance(self, kind: str) -> None:
        for costs, K in cases(kind):
            least = min(squares(costs, sizes) for sizes in every_cut(len(costs), K))
            assert squares(costs, partition(costs, K, "min_variance")) <= least * ROUNDED, (costs, K)


@pytest.mark.parametrize("objective", ["min_max", "min_variance"])
class TestBothObjectives:
    def test_equal_layers_that_do_not_divide_go_to_the_later_cells(self, objective: str) -> None:
        assert partition([0.1] * 10, 4, objective) == [2, 2, 3, 3]

    @pytest.mark.timeout(60)  # each takes a second or two; comparing all cuts would take days
    @pytest.mark.parametrize(("K", "last"), [*((K, 1.0) for K in (2, 1663, 3326)), (16, 1e6)])
    def test_thousands_of_layers_in_non_empty_cells(self, objective: str, K: int, last: float) -> None:
        costs = [1.0 + (layer % 7) / 10 for layer in range(3325)] + [last]
        sizes = partition(costs, K, objective)
        assert (len(sizes), sum(sizes), min(sizes) >= 1) == (K, 3326, True)

    def test_more_cells_than_layers(self, objective: str) -> None:
        told = refusal_of(partition, [1.0] * 14, 16, objective, error=PartitionError)
        assert told == "pipeline.K=16 but the model has 14 layers: use pipeline.K<=14 or a deeper model"


@pytest.mark.parametrize(("sizes", "K"), [([2, 2], 3), ([4, 0], 2), ([2, 1], 2), ([3, 3], 2)])
def test_sizes_that_are_given_must_fit(sizes: list[int], K: int) -> None:
    with pytest.raises(PartitionError, match=f"pipeline.K={K} sizes of 1 or more .* the model's 4 layers"):
        partition([1, 1, 1, 1], K, sizes)
