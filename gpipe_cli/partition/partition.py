"""Cuts L layers into K contiguous, non-empty cells: costs in, sizes out (paper, sections 2.1 and 2.2).

The paper minimises the variance of the cells' costs C_k by a heuristic of its own. Both objectives here are exact:
``min_variance``, the paper's words, and ``min_max``, because the slowest cell sets the pace of a pipeline
(`pipeline.partition=auto` begins with it, over workers: `cutter.py`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import ROUND_ROBIN, PipelineConfig
from ..errors import ConfigurationError
from ..schedule.own_lists import is_file, read_lists, why_not_for

TIE = 1e-13  # share by which sums of the same costs differ by rounding
LARGEST_COST = 1e301  # of a layer: a whole step is a finite sum
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class PartitionError(ConfigurationError):
    """Raised when layers cannot be cut, or cells cannot be placed, as asked."""


def partition(
    costs: Sequence[float],
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
        Layers in each cell: K positive numbers with sum L. Where cuts tie, the later cells take more layers: under
        1F1B the earlier ones keep more micro-batches.

    Raises:
        PartitionError: K is above L, the sizes do not fit, a cost is negative or not finite, or cuts would have to lie
            where they may not.
    """
    L = len(costs)
    if not isinstance(objective, str):
        return _checked_sizes(objective, K, L, inseparable)
    places = checked_places(costs, K, inseparable)
    ends = divide([np.concatenate([[0.0], np.cumsum(costs)])[places]] * K, [1] * K, objective=objective)
    assert ends is not None  # each cell has a place
    return [int(size) for size in np.diff(places[ends])]


def checked_places(costs: Sequence[float], K: int, inseparable: Mapping[int, str]) -> Places:
    """Returns the places where K cells may begin and end, as numbers of layers before them, from 0 to L.

    Raises:
        PartitionError: as in `partition`.
    """
    L = len(costs)
    if K > L:
        said = f"pipeline.K={K} but the model has {_count(L, 'layer')}"
        raise PartitionError(f"{said}: use pipeline.K<={L} or a deeper model")
    for layer, cost in enumerate(costs):
        if not 0 <= cost <= LARGEST_COST:
            raise PartitionError(f"the cost of layer {layer} is {cost}: give a number from 0 to {LARGEST_COST}")
    places = np.array([0, *(end for end in range(1, L + 1) if end == L or end - 1 not in inseparable)])
    if len(places) <= K:
        cells, varying = _count(len(places) - 1, "cell"), ", ".join(inseparable.values())
        said = f"pipeline.K={K} but the model can be cut into {cells}: what {varying} return has shapes that"
        raise PartitionError(f"{said} depend on values: use pipeline.K<={len(places) - 1}")
    return places


def divide(
    totals: Sequence[Floats], least: Sequence[int], last: Sequence[Places] | None = None, objective: str = "min_max"
) -> Places | None:
    """Divides elements into consecutive parts, so that their costs meet the objective best.

    Args:
        totals: one array for each part; its [i] is what elements 0 to i - 1 would cost the part, and never falls.
        least: fewest elements of each part.
        last: one array for each part; its [i] is where the part ends at the latest if it begins with element i. None:
            anywhere.
        objective: ``min_max`` or ``min_variance``, described by `partition`.

    Returns:
        0 and the end of each part; None if there is no such division.
    """
    parts, whole = len(totals), max(float(total[-1]) for total in totals)
    # As shares of the whole, whose squares cannot overflow. If nothing costs anything, all elements count alike.
    totals = [total / whole if whole else np.linspace(0.0, 1.0, len(total)) for total in totals]
    # Low, so that few cuts are tried; mostly it is enough.
    limit = 2 / parts + max(float(np.diff(total).max()) for total in totals)
    while (ends := _least(totals, least, last, limit, 0)) is None:
        if limit > 1:
            return None
        limit *= 2
    costs = np.array([total[stop] - total[start] for total, start, stop in zip(totals, ends, ends[1:], strict=False)])
    limit = float(costs.max())
    if objective == "min_variance":  # no cell of a better cut is further from the mean than this
        limit = float(costs.mean()) + math.sqrt(float(np.square(costs - costs.mean()).sum()))
    return _least(totals, least, last, limit, 2)


def _least(
    totals: Sequence[Floats], least: Sequence[int], last: Sequence[Places] | None, limit: float, power: int
) -> Places | None:
    """Returns 0 and the ends of the parts that cost least together; None if every division exceeds ``limit``.

    A dynamic programme: it finds for each part, and each place where the part can end, the best place to begin.

    Args:
        totals, least, last: costs, fewest elements and latest ends of the parts, described by `divide`.
        limit: most that a part may cost.
        power: 2 to add up the squares of the parts' costs; 0 to count only the dearest part.
    """
    limit *= 1 + TIE
    places = len(totals[0])
    stops, best, begins = np.arange(places), np.full(places, np.inf), []
    best[0] = 0
    for part, (total, fewest) in enumerate(zip(totals, least, strict=True)):
        widest = max(fewest, int((np.searchsorted(total, total + limit, "right") - 1 - stops).max()))
        if part == 0 or last is not None or fewest != least[part - 1] or not np.array_equal(total, totals[part - 1]):
            cost = total[:, None] - _at_starts(total, widest, fewest, -np.inf)
            cost[cost > limit] = np.inf
            if power:
                cost *= cost
            if last is not None:
                cost[_at_starts(last[part], widest, fewest, -1) < stops[:, None]] = np.inf
        found = (np.add if power else np.maximum)(_at_starts(best, widest, fewest, np.inf), cost)
        best = found.min(axis=1)
        begins.append(stops - widest + (found <= best[:, None] * (1 + TIE)).argmax(axis=1))
    if math.isinf(best[-1]):
        return None
    ends = [places - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return np.array(ends[::-1])


def _at_starts(values: npt.NDArray[Any], widest: int, fewest: int, outside: float) -> npt.NDArray[Any]:
    """Returns for each end of a part the values at its possible begins, those of ``widest`` elements first.

    Args:
        values: one value for each place.
        widest, fewest: most and fewest elements of the part.
        outside: value for begins before the first place.
    """
    padded = np.concatenate([np.full(widest, outside), values])
    return np.lib.stride_tricks.sliding_window_view(padded, widest - fewest + 1)[: len(values)]


def cell_layers(sizes: Sequence[int]) -> list[range]:
    """Returns the layers of each cell, as ranges of layer numbers."""
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def even_placement(config: PipelineConfig, workers: int) -> tuple[int, ...]:
    """Returns the worker of each cell: as many cells on each, with one more on later workers where they do not divide.

    With a schedule in rounds cell c lies on worker c mod W. A file of instruction lists has its own placement.

    Raises:
        PartitionError: not every worker has a cell, or in rounds not as many as the others.
    """
    if why := config.why_not_on(workers):
        raise PartitionError(why)
    if is_file(config.schedule):
        if why := why_not_for(config.schedule, config.K, config.M, workers):
            raise PartitionError(why)
        return read_lists(config.schedule).placement
    K, in_rounds = config.K, config.schedule in ROUND_ROBIN
    return tuple(cell % workers if in_rounds else workers - 1 - (K - 1 - cell) * workers // K for cell in range(K))


def _checked_sizes(sizes: Sequence[int], K: int, L: int, inseparable: Mapping[int, str]) -> list[int]:
    """Returns the sizes as a list; raises PartitionError if they do not fit, or cut where no cut may lie."""
    sizes = list(sizes)
    if len(sizes) != K or min(sizes) < 1 or sum(sizes) != L:
        raise PartitionError(
            f"pipeline.partition={sizes} are {len(sizes)} sizes, in all {sum(sizes)}: give pipeline.K={K} sizes "
            f"of 1 or more that add up to the model's {_count(L, 'layer')}, or use pipeline.partition=auto"
        )
    for end in accumulate(sizes[:-1]):
        if end - 1 in inseparable:
            said = f"pipeline.partition={sizes} cuts behind layer {inseparable[end - 1]!r}, where the shape returned"
            raise PartitionError(f"{said} depends on values: move the cut, or use pipeline.partition=auto")
    return sizes


def _count(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
