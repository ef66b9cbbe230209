"""Divides layers between workers so that the busiest worker has as little to do as possible (paper, section 2.2).

What a worker does with a layer in a step depends on its place in the pipeline: under 1f1b the last worker recomputes
nothing. So every worker has seconds of its own for each layer, as running totals over the layers: `Totals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, combinations, pairwise

import numpy as np
import numpy.typing as npt

Totals = npt.NDArray[np.float64]  # [i]: seconds of one step for layers 0 to i - 1
Places = npt.NDArray[np.int64]
Bytes = Callable[[int, int, int], float]  # of a worker with layers start to stop - 1
_HALVINGS = 40  # of the busiest worker's seconds
_ROUNDS = 100  # of evening out; a few are enough
MANY = 32  # cells, beyond which layers are moved one by one only


class NothingFits(ValueError):
    """Raised when some worker's memory is too small, whatever the cut."""


def balance(totals: Sequence[Totals], least: Sequence[int], bytes_: Bytes | None, room: Sequence[float]) -> list[int]:
    """Returns the layers of each worker, neighbours together, with the least seconds of the busiest worker.

    Among such cuts it returns one whose other workers are even, too; where two are, later workers take more layers.

    Args:
        totals: one for each worker.
        least: layers that each worker has at least.
        bytes_: of a worker with some layers, never less with more layers; None: any number of layers fits.
        room: most bytes of each worker.

    Raises:
        NothingFits: with every cut some worker has more bytes than room.
    """
    furthest = [_furthest(worker, len(totals[0]), bytes_, room) for worker in range(len(totals))]
    high = max(float(each[-1]) for each in totals)
    ends = _ends_within(high, totals, least, furthest)
    if ends is None:
        raise NothingFits
    low = 0.0
    for _ in range(_HALVINGS):
        limit = (low + high) / 2
        if (found := _ends_within(limit, totals, least, furthest)) is None:
            low = limit
        else:
            ends, high = found, limit
    ends = _evened(ends, totals, least, furthest)
    return [end - start for start, end in pairwise([0, *ends])]


def _furthest(worker: int, places: int, bytes_: Bytes | None, room: Sequence[float]) -> Places:
    """Returns for each start the last stop up to which a worker's layers fit it."""
    if bytes_ is None:
        return np.full(places, places - 1)
    found, stop = [], 0
    for start in range(places):
        stop = max(stop, start)
        while stop + 1 < places and bytes_(worker, start, stop + 1) <= room[worker]:
            stop += 1
        found.append(stop)
    return np.array(found)


def _ends_within(
    limit: float, totals: Sequence[Totals], least: Sequence[int], furthest: Sequence[Places]
) -> list[int] | None:
    """Returns the end of each worker's layers, none with more than ``limit`` seconds; None where there is no such cut.

    Follows all places where a worker can end. To fill each worker would not do, because a later one that has a dear
    layer left would find no other.
    """
    starts, steps = np.array([0]), []
    for total, fewest, fitting in zip(totals, least, furthest, strict=True):
        last = np.minimum(np.searchsorted(total, total[starts] + limit, "right") - 1, fitting[starts])
        starts, last = starts[last >= starts + fewest], last[last >= starts + fewest]
        steps.append((starts, last))
        reached = np.zeros(len(total) + 1, int)
        np.add.at(reached, starts + fewest, 1)
        np.add.at(reached, last + 1, -1)
        starts = np.flatnonzero(np.cumsum(reached)[:-1])
    if not len(starts) or starts[-1] != len(totals[0]) - 1:
        return None
    ends = [len(totals[0]) - 1]
    for (begun, last), fewest in zip(steps[:0:-1], least[:0:-1], strict=True):
        ends.append(int(begun[(begun + fewest <= ends[-1]) & (last >= ends[-1])][0]))
    return ends[::-1]


def _evened(ends: list[int], totals: Sequence[Totals], least: Sequence[int], furthest: Sequence[Places]) -> list[int]:
    """Returns ends moved between neighbours, one after the other, until each has nearly the seconds of the next."""
    last = len(ends) - 1
    squares = math.inf
    for _ in range(_ROUNDS):
        for worker in reversed(range(last)):  # what is too much for one worker goes to the front,
            ends[worker] = _even_end(worker, ends, totals, least, furthest, -1)
        for worker in range(last):  # or, where that makes no difference, to the back
            ends[worker] = _even_end(worker, ends, totals, least, furthest, 1)
        before, squares = (
            squares,
            sum(
                float(total[stop] - total[start]) ** 2
                for total, (start, stop) in zip(totals, pairwise([0, *ends]), strict=True)
            ),
        )
        if squares >= before:
            break
    return ends


def _even_end(
    worker: int,
    ends: Sequence[int],
    totals: Sequence[Totals],
    least: Sequence[int],
    furthest: Sequence[Places],
    prefer: int,
) -> int:
    """Returns the end of a worker with which the busier of it and the next has least; of equal ones, by ``prefer``."""
    start, stop = ends[worker - 1] if worker else 0, ends[worker + 1]
    own, after = totals[worker], totals[worker + 1]
    middle = start + int(np.searchsorted(own[start : stop + 1] + after[start : stop + 1], own[start] + after[stop]))
    fitting = [ends[worker]]
    for end in (middle - 1, middle, middle + 1):
        enough = start + least[worker] <= end <= stop - least[worker + 1]
        if enough and end <= furthest[worker][start] and stop <= furthest[worker + 1][end]:
            fitting.append(end)
    return min(fitting, key=lambda end: (max(own[end] - own[start], after[stop] - after[end]), prefer * end))


def balance_rounds(totals: Sequence[Totals], K: int, bytes_: Bytes | None, room: Sequence[float]) -> list[int]:
    """Returns the layers of each of K cells, cell c on worker c mod W, of which a step takes nearly the least seconds.

    Even workers alone would not do: where a cell takes longer than the others of its round, they wait for it. So it
    begins with the cut whose largest cell is least, and moves one layer, or two, between neighbouring cells while the
    squares of the workers' seconds, and of the cells' as if each worker had only such cells, become less.

    Raises:
        NothingFits: no cut is found in which every worker's bytes are within its room.
    """
    workers = len(totals)
    sizes = balance([totals[cell % workers] for cell in range(K)], [1] * K, None, [])
    ends = [0, *accumulate(sizes)]
    running = [each.tolist() for each in totals]

    def load(cell: int) -> tuple[float, float]:
        worker, start, stop = cell % workers, ends[cell], ends[cell + 1]
        return running[worker][stop] - running[worker][start], bytes_(worker, start, stop) if bytes_ else 0.0

    loads = [load(cell) for cell in range(K)]
    seconds = [sum(loads[cell][0] for cell in range(worker, K, workers)) for worker in range(workers)]
    held = [sum(loads[cell][1] for cell in range(worker, K, workers)) for worker in range(workers)]

    def weigh(cells: Collection[int]) -> tuple[float, float]:
        """Returns the bytes too many, and the squares of the seconds, of the workers and cells that these touch."""
        touched = {cell % workers for cell in cells}
        over = sum(max(0.0, held[worker] - room[worker]) for worker in touched) if room else 0.0
        squares = sum(seconds[worker] ** 2 for worker in touched)
        return over, squares + K // workers * sum(loads[cell][0] ** 2 for cell in cells)

    def put(cells: Collection[int], moved: Collection[tuple[float, float]]) -> None:
        for cell, new in zip(cells, moved, strict=True):
            seconds[cell % workers] += new[0] - loads[cell][0]
            held[cell % workers] += new[1] - loads[cell][1]
            loads[cell] = new

    single = [((end, step),) for end in range(1, K) for step in (-1, 1)]
    moves = [*single, *((one, other) for (one,), (other,) in combinations(single, 2))] if K <= MANY else single
    moved = True
    while moved:
        moved = False
        for move in moves:
            for end, step in move:
                ends[end] += step
            cells = sorted({cell for end, _ in move for cell in (end - 1, end)})
            if all(ends[cell] < ends[cell + 1] for cell in cells):
                before, old = weigh(cells), [loads[cell] for cell in cells]
                put(cells, [load(cell) for cell in cells])
                if _less(weigh(cells), before):
                    moved = True
                    continue
                put(cells, old)
            for end, step in move:
                ends[end] -= step
    if room and any(most > least * (1 + 1e-9) for most, least in zip(held, room, strict=True)):
        raise NothingFits
    return [end - start for start, end in pairwise(ends)]


def _less(new: tuple[float, ...], old: tuple[float, ...]) -> bool:
    """Returns whether the first of two values that differ by more than rounding is less in ``new``."""
    pairs = zip(new, old, strict=True)
    return next((one < other for one, other in pairs if abs(one - other) > 1e-9 * (abs(one) + abs(other))), False)
