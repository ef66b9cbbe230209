"""Moves layers between neighbouring cells for as long as the simulated step becomes shorter.

Even workers are not the end of it. Of few micro-batches much time goes into filling and draining the pipeline, and
there a layer costs more in front of the others than behind them, or less, as the order of the work has it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations

GAIN = 2e-3  # of a step: times are not known so exactly that less would be worth another cut


def shortened(
    sizes: Sequence[int], least: Sequence[int], seconds: Callable[[Sequence[int]], float], trials: int
) -> list[int]:
    """Returns sizes from which no move of an element to a neighbour, nor two of them, makes the step shorter.

    Args:
        sizes: of each cell, or of all cells of each worker.
        least: sizes that each has at least.
        seconds: of a step with such sizes; infinite where they do not fit.
        trials: how often ``seconds`` may be called.
    """
    best, known = list(sizes), seconds(sizes)
    single = [((place, step),) for place in range(len(best) - 1) for step in (1, -1)]
    moves = deque([*single, *((one, other) for (one,), (other,) in combinations(single, 2))])
    tried = 0  # moves in a row that were not worth it
    while tried < len(moves) and trials > 1:
        moved = [*best]
        for place, step in moves[0]:
            moved[place], moved[place + 1] = moved[place] + step, moved[place + 1] - step
        possible = all(size >= fewest for size, fewest in zip(moved, least, strict=True))
        found = seconds(moved) if possible else math.inf
        trials -= possible
        if found < known * (1 - GAIN):
            best, known, tried = moved, found, 0
        else:
            tried += 1
            moves.rotate(-1)
    return best
