"""Estimates what a worker would hold with some of the layers, for cuts that must fit its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from ..schedule.instruction import InstructionLists
from ..schedule.schedule import most_kept
from .cells import cell_sizes
from .measure.layer_facts import LayerFacts
from .measure.measurement import Measurement


def bytes_of_workers(
    measured: Measurement,
    lists: InstructionLists,
    M: int,
    held: Callable[[LayerFacts], float],
) -> Callable[[int, int, int], float]:
    """Returns the function for the most bytes of a worker with the layers start to stop - 1, as of one cell.

    It is a little more than the plan of that cut says, where a worker has several cells: not all of them are at their
    worst at the same moment. Parameters that several layers share count in each.

    Args:
        lists: one list of instructions for each worker.
        M: micro-batches.
        held: bytes of a layer's weights, gradients, optimizer state and averages.
    """
    layers, loss = measured.layers, measured.loss
    sums = [0.0, *accumulate(map(held, layers))]
    kept = [most_kept(each) for each in lists]
    inputs = [max(each.inputs.values()) for each in kept]
    graphs = [max(each.graphs.values()) for each in kept]

    @cache
    def activations(start: int, stop: int, inputs: int, graphs: int) -> float:
        is_last = stop == len(layers)
        own: Sequence[LayerFacts] = layers[start:stop] + ([loss] if is_last and loss is not None else [])
        boundary = layers[start - 1].boundary if start else measured.inputs
        size = cell_sizes(own, boundary, measured.target_bytes, is_last)
        graph = size.graph + size.outputs
        working = (graphs - 1) * graph + max(size.forward, graph + size.backward)
        return size.gathered + working + (inputs if start else M) * size.message

    def bytes_(worker: int, start: int, stop: int) -> float:
        if stop == start:
            return 0.0
        return sums[stop] - sums[start] + activations(start, stop, inputs[worker], graphs[worker])

    return bytes_
