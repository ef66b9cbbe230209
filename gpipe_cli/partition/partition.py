"""Cuts L layers into K contiguous, non-empty cells: costs in, sizes out (paper, sections 2.1 and 2.2).

The paper minimises the variance of the cells' costs C_k by a heuristic of its own. Both objectives here are exact:
``min_variance``, the paper's words, and ``min_max``, because the slowest cell sets the pace of a pipeline.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..errors import ConfigurationError
from ..schedule.orders import ROUND_ROBIN

OBJECTIVES = ("min_max", "min_variance")  # pipeline.partition=auto minimises the first, over workers (`cut.py`)
_EXACT_SQUARES = 1 << 26  # sums of integers below this have squares that float64 holds exactly


class PartitionError(ConfigurationError):
    """Raised when layers cannot be cut, or cells cannot be placed, as asked."""


def partition(
    costs: Sequence[float | Fraction],
    K: int,
    objective: str | Sequence[int],
    inseparable: Mapping[int, str] = MappingProxyType({}),
) -> list[int]:
    """Cuts the layers into K cells.

    Args:
        costs: c_i of each layer, in any one unit; zeros are fine, all zeros count as all equal.
        K: cells.
        objective: ``min_max``: the smallest possible cost of the most expensive cell and, among the cuts that reach
            it, the least variance; ``min_variance``: the least variance; or the K sizes themselves.
        inseparable: names of the layers behind which no cut may lie, by their numbers.

    Returns:
        Layers in each cell: K positive numbers with sum L. Where cuts tie exactly, the later cells take more layers:
        under 1F1B the earlier ones keep more micro-batches.

    Raises:
        PartitionError: K is not within 1 … L, the sizes do not fit, the objective is unknown, a cost is negative or not
            finite, or cuts would have to lie where they may not.
    """
    L = len(costs)
    if not isinstance(objective, str):
        sizes = _checked_sizes(objective, K, L)
        for end in accumulate(sizes[:-1]):
            if end - 1 in inseparable:
                raise PartitionError(
                    f"pipeline.partition={sizes} cuts behind layer {inseparable[end - 1]!r}, where the shape of what "
                    "is returned depends on values: move the cut, or use pipeline.partition=auto"
                )
        return sizes
    if objective not in OBJECTIVES:
        raise PartitionError(f"pipeline.partition={objective}: use auto, min_variance or the cells' sizes, as [3,5,4]")
    if K < 1:
        raise PartitionError(f"pipeline.K={K}: use pipeline.K=1 or more")
    if K > L:
        raise PartitionError(
            f"pipeline.K={K} but the model has {_count(L, 'layer')}: use pipeline.K<={L} or a deeper model"
        )
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise PartitionError(f"the cost of layer {layer} is {cost}: give a finite number, 0 or more")
    if inseparable:
        return _partition_groups(costs, K, objective, inseparable)
    sums = _prefix_sums(costs)
    limit = _smallest_limit(sums, K) if objective == "min_max" else sums[-1]
    ends = _least_squares(sums, K, limit)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _partition_groups(
    costs: Sequence[float | Fraction], K: int, objective: str, inseparable: Mapping[int, str]
) -> list[int]:
    """Cuts between groups of layers that belong together, as if each group were a layer."""
    ends = [number + 1 for number in range(len(costs)) if number not in inseparable or number + 1 == len(costs)]
    if len(ends) < K:
        raise PartitionError(
            f"pipeline.K={K} but the model can be cut into {_count(len(ends), 'cell')}: the shapes of what "
            f"{', '.join(inseparable.values())} return depend on values, so that no cut may lie behind them: use "
            f"pipeline.K<={len(ends)}"
        )
    groups = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    together = [sum((Fraction(costs[layer]) for layer in group), Fraction()) for group in groups]
    sizes = partition(together, K, objective)
    return [sum(len(groups[number]) for number in numbers) for numbers in cell_layers(sizes)]


def cell_layers(sizes: Sequence[int]) -> list[range]:
    """Returns the layers of each cell, as ranges of layer numbers."""
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def cell_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Returns C_k, the sum of the costs of each cell's layers."""
    return [math.fsum(costs[layer] for layer in layers) for layers in cell_layers(sizes)]


def place(cell_costs: Sequence[float], workers: int) -> tuple[int, ...]:
    """Puts K cells on W <= K workers, neighbours together, so that the busiest worker has as little to do as possible.

    Returns:
        ``placement[cell] = worker``, ascending from 0 without gaps.

    Raises:
        PartitionError: there is no worker, or there are more workers than cells.
    """
    refuse_more_workers_than_cells(len(cell_costs), workers)
    sizes = partition(cell_costs, workers, "min_max")
    return tuple(worker for worker, size in enumerate(sizes) for _ in range(size))


def refuse_more_workers_than_cells(K: int, workers: int) -> None:
    """Raises PartitionError where not every worker has a cell."""
    if not 1 <= workers <= K:
        raise PartitionError(
            f"{_count(workers, 'worker')} for pipeline.K={K}: every worker runs at least one cell; use 1 to {K} workers"
        )


def round_robin(K: int, workers: int) -> tuple[int, ...]:
    """Puts cell c on worker c mod W, each worker having K/W of the K cells.

    Raises:
        PartitionError: there is no worker, or K is no multiple of W.
    """
    if workers < 1 or K % workers:
        fitting = [str(number) for number in range(1, K + 1) if K % number == 0]
        raise PartitionError(
            f"pipeline.schedule=interleaved_1f1b gives each worker the same number of cells, but pipeline.K={K} is no "
            f"multiple of {_count(workers, 'worker')}: use pipeline.workers={' or '.join(fitting)} or another K"
        )
    return tuple(cell % workers for cell in range(K))


def placement(kind: str, cell_costs: Sequence[float], workers: int) -> tuple[int, ...]:
    """Returns the worker of each cell, as the kind of schedule needs it: see `place` and `round_robin`."""
    return round_robin(len(cell_costs), workers) if kind in ROUND_ROBIN else place(cell_costs, workers)


def _checked_sizes(sizes: Sequence[int], K: int, L: int) -> list[int]:
    sizes = list(sizes)
    if len(sizes) != K or min(sizes) < 1 or sum(sizes) != L:
        raise PartitionError(
            f"pipeline.partition={sizes} are {len(sizes)} sizes, in all {sum(sizes)}: give pipeline.K={K} sizes "
            f"of 1 or more that add up to the model's {_count(L, 'layer')}, or use pipeline.partition=auto"
        )
    return sizes


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _prefix_sums(costs: Sequence[float | Fraction]) -> list[int]:
    """Returns [0, c_0, c_0 + c_1, ...] times the factor that makes them the smallest integers.

    Floats are exact fractions, so nothing is rounded: equal sums stay equal.
    """
    fractions = [Fraction(cost) for cost in costs]
    if not any(fractions):
        return list(range(len(costs) + 1))
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*integers)
    return [0, *accumulate(integer // divisor for integer in integers)]


def _smallest_limit(sums: Sequence[int], K: int) -> int:
    """Finds the least cost of the most expensive cell, by bisection; filling cells up to the limit is optimal."""
    largest = max(b - a for a, b in pairwise(sums))
    low, high = max(largest, -(-sums[-1] // K)), sums[-1]
    while low < high:
        limit = (low + high) // 2
        end = 0
        for _ in range(K):
            end = bisect_right(sums, sums[end] + limit) - 1
        low, high = (low, limit) if end == len(sums) - 1 else (limit + 1, high)
    return low


def _least_squares(sums: Sequence[int], K: int, limit: int) -> list[int]:
    """Returns the K ends of the cells with the least sum of squared costs, no cell above ``limit``.

    The sum of the C_k is fixed, so the least sum of squares is the least variance. Dynamic programming over cells:
    least(k, end) = min over start of least(k-1, start) + (sums[end] - sums[start])². The best start never moves left
    when the end moves right, which leaves O(L log L) of the O(L²) pairs per cell.
    """
    first_start = np.array([bisect_left(sums, total - limit) for total in sums])
    windows = _windows(sums, K, limit)
    unit = 1 if sums[-1] < _EXACT_SQUARES else sums[-1]
    position = np.array([total / unit for total in sums])
    least = np.array([0.0])  # for the ends in windows[k-1], k = 1
    best_starts = []
    for k in range(1, K + 1):
        ends = np.arange(windows[k][0], windows[k][1] + 1)
        lowest = np.maximum(first_start[ends], windows[k - 1][0])
        highest = np.minimum(ends - 1, windows[k - 1][1])
        starts, least = _row_minima(position, ends, lowest, highest, least, windows[k - 1][0])
        best_starts.append(starts)
    cuts = [len(sums) - 1]
    for k in range(K, 1, -1):
        cuts.append(int(best_starts[k - 1][cuts[-1] - windows[k][0]]))
    return cuts[::-1]


def _windows(sums: Sequence[int], K: int, limit: int) -> list[tuple[int, int]]:
    """Returns, for k = 0..K, the lowest and highest end of cell k-1 with which all cells can stay under the limit."""
    L = len(sums) - 1
    highest, lowest = [0], [L]
    for k in range(1, K + 1):
        highest.append(min(bisect_right(sums, sums[highest[-1]] + limit) - 1, L - (K - k)))
        lowest.append(max(bisect_left(sums, sums[lowest[-1]] - limit), K - k))
    return list(zip(lowest[::-1], highest, strict=True))


_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def _row_minima(
    position: _Floats, ends: _Integers, lowest: _Integers, highest: _Integers, least_before: _Floats, offset: int
) -> tuple[_Integers, _Floats]:
    """Returns for each end the leftmost best start in [lowest, highest], and the least sum of squares with it.

    Works level by level, all rows of a level at once: the middle row, then the middles of the two halves, and so on;
    the best starts of a row's known neighbours bound its own.
    """
    rows = len(ends)
    starts, least = np.zeros(rows, np.int64), np.zeros(rows)
    stride = 1 << rows.bit_length()
    while stride > 1:
        stride //= 2
        level = np.arange(stride - 1, rows, 2 * stride)
        if not len(level):
            continue
        low, high = lowest[level].copy(), highest[level].copy()
        left, right = level - stride, level + stride
        low[left >= 0] = np.maximum(low[left >= 0], starts[left[left >= 0]])
        high[right < rows] = np.minimum(high[right < rows], starts[right[right < rows]])
        sizes = high - low + 1
        first = np.cumsum(sizes) - sizes
        candidates = np.arange(first[-1] + sizes[-1]) + np.repeat(low - first, sizes)
        cell = np.repeat(position[ends[level]], sizes) - position[candidates]
        values = least_before[candidates - offset] + cell * cell
        minima = np.minimum.reduceat(values, first)
        hits = np.flatnonzero(values == np.repeat(minima, sizes))
        starts[level] = candidates[hits[np.searchsorted(hits, first)]]
        least[level] = minima
    return starts, least
