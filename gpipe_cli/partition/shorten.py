"""Moves layers between neighbouring cells for as long as the simulated step becomes shorter.

Balanced workers do not always make the shortest step: with few micro-batches the pipeline fills and drains for a large
part of it, and what a layer adds there depends on its place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations

Move = tuple[tuple[int, int], ...]  # each: the place of a cell, and 1 or -1, by which it grows at the cost of the next
GAIN = 2e-3  # of a step: times are not known so exactly that less would be worth another cut


def shortened(
    sizes: Sequence[int], least: Sequence[int], seconds: Callable[[Sequence[int]], float], trials: int
) -> list[int]:
    """Returns sizes from which no move of an element to a neighbour, nor two of them, makes the step shorter.

    Args:
        sizes: of each cell, or of all cells of each worker.
        least: sizes that each has at least.
        seconds: of a step with such sizes.
        trials: how often ``seconds`` may be called; two moves at once are tried where it may be for all single ones.
    """
    if trials < 2:
        return list(sizes)
    best, known = list(sizes), seconds(sizes)
    moves: deque[Move] = deque(((place, step),) for place in range(len(best) - 1) for step in (1, -1))
    if len(moves) < trials:
        moves += [one + other for one, other in combinations(moves, 2)]
    tried = 0  # moves in a row that gained too little
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
