"""Works out seconds that no schedule of a training step can undercut: how near a plan is to the best possible.

A schedule here is any order of the work: each worker does one thing at a time, each micro-batch passes the cells
forward and then backward, and for each micro-batch and cell a graph is kept or made again. Messages take no time. A
graph fills memory while its forward (or recompute) and its backward run: nothing else of the worker comes or goes
meanwhile, so what fits at the end of the one and the beginning of the other fits throughout.

A backward may be divided into halves. The graph is then taken to be gone after the first, the input's.

The bound is the largest of these:

* A worker waits for its first micro-batch, does all of its work, and then the cells in front of it do the last
  backward. Of its work only weight gradients may come after its last input gradient. The same holds for some of its
  cells alone, from any one on.
* A graph that is kept lives at least while its micro-batch is in the later cells; one that is recomputed, for a
  recompute and a backward. Bytes times lives must go into memory times the seconds in which graphs live. If they do
  not, graphs are recomputed, first those that save most for the least seconds (parts of a graph count as parts), and
  the seconds are added.
* All backwards of a worker follow the first micro-batch's way to the end and back, and all forwards come before the
  last one's. With M=1 this is the path of one micro-batch.
* Any cut runs as one worker for each layer could, so their bound holds. And W workers need at least a W-th of all the
  work, of their waits for the first layers, and of the recomputes that their memory together requires. The optimizer's
  update is left out here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf

from ..partition.cost import LayerTimes


@dataclass(frozen=True)
class _Least:
    """Holds the least seconds that one micro-batch takes in a cell, whatever the schedule, and its graph's bytes.

    Attributes:
        forward: seconds of a forward without a graph or with one, whichever is less.
        ready: seconds to have a graph: a forward that keeps it, or one and a recompute.
        urgent: seconds of the part of backward that the cell in front waits for, the input's gradient.
        backward: seconds of the whole backward.
        extra: seconds that a recompute adds.
        arrival: seconds from the start of the step until the forward can begin: forwards of the cells in front.
        turn: seconds from the end of the forward to the start of the backward: later cells' forwards and backwards.
        drain: seconds after the urgent backward until the step ends: urgent backwards of the cells in front.
        kept: seconds that a graph lives which is kept from the forward on.
        again: seconds that a graph lives which is recomputed.
        graph: bytes of the graph.
    """

    forward: float
    ready: float
    urgent: float
    backward: float
    extra: float
    arrival: float
    turn: float
    drain: float
    kept: float
    again: float
    graph: float


def step_bound(
    cells: Sequence[LayerTimes],
    graphs: Sequence[float],
    placement: Sequence[int],
    M: int,
    memory: Sequence[float],
) -> float:
    """Returns seconds that every schedule of a step takes at least; infinity where no schedule fits.

    Each worker gives bounds, and so does each group of its cells from some cell k on, as if it had no others.

    Args:
        cells: seconds of one micro-batch in each cell, on its own worker.
        graphs: bytes of each cell that are kept from the forward, or from the recompute, to the backward.
        placement: ``placement[cell]`` is the cell's worker; neighbours, round robin or any other.
        M: micro-batches.
        memory: bytes that each worker has for graphs; infinity: no limit.
    """
    of_worker: dict[int, list[_Least]] = {}
    least, longest = _least(cells, graphs), 0.0
    for cell in reversed(range(len(cells))):
        group = of_worker.setdefault(placement[cell], [])
        group.insert(0, least[cell])
        longest = max(longest, _work_bound(group, M, memory[placement[cell]]), _turn_bound(group, M))
    return longest


def bound_of_any_cut(
    layers: Sequence[LayerTimes],
    graphs: Sequence[float],
    speeds: Sequence[float],
    M: int,
    memory: float,
    memory_of_all: float,
) -> float:
    """Returns seconds that every schedule takes at least, however the layers are cut, and wherever the cells lie.

    Two bounds; the larger counts. (1) A worker with several layers does no more than one worker for each of them could,
    so `step_bound` of one layer per worker holds. (2) All workers together do all the work, each by its speed. The j-th
    worker in the pipeline (j from 0) has j layers or more in front. It waits for their forwards at first and for their
    backwards at last. The least is lost if the fastest worker is first. The graphs of all share `memory_of_all`.

    Args:
        layers: seconds of one micro-batch in each layer, on the fastest worker.
        graphs: bytes that any cell with the layer keeps.
        speeds: the workers' speeds, in any unit; each gets at least one layer.
        M: micro-batches.
        memory: most bytes that a worker has for graphs; infinity: no limit.
        memory_of_all: bytes that all workers together have for graphs.
    """
    if memory_of_all < 0:
        return inf
    least, parts = _least(layers, graphs), sorted((speed / max(speeds) for speed in speeds), reverse=True)
    arrivals = sum(part * layer.arrival for part, layer in zip(parts, least, strict=False))
    drains = sum(part * layer.drain for part, layer in zip(parts, least, strict=False))
    urgent = arrivals + drains + M * sum(layer.ready + layer.urgent for layer in least)  # until the last input gradient
    whole = arrivals + M * sum(layer.ready + layer.backward for layer in least)  # all work, weight gradients too
    shared = max(_with_recompute(least, M, memory_of_all / sum(parts), work, 0.0) for work in (urgent, whole))
    return max(shared / sum(parts), step_bound(layers, graphs, range(len(layers)), M, [memory] * len(layers)))


def _least(cells: Sequence[LayerTimes], graphs: Sequence[float]) -> list[_Least]:
    """Returns the least seconds of each cell, with those that it waits for the cells before and behind it.

    Args:
        cells: seconds of one micro-batch in each cell.
        graphs: bytes of one micro-batch's graph in each cell.
    """
    forwards = [min(cell.inference, cell.forward) for cell in cells]
    urgent = [min(cell.backward, cell.input_gradient) for cell in cells]
    arrivals, drains = ([0.0, *accumulate(seconds)] for seconds in (forwards, urgent))
    least = []
    for number, cell in enumerate(cells):
        forward, back = forwards[number], urgent[number]
        turn = arrivals[-1] - arrivals[number + 1] + drains[-1] - drains[number + 1]
        least.append(
            _Least(
                forward=forward,
                ready=min(cell.forward, forward + cell.recompute),
                urgent=back,
                backward=min(cell.backward, cell.input_gradient + cell.weight_gradient),
                extra=max(0.0, forward + cell.recompute - cell.forward),
                arrival=arrivals[number],
                turn=turn,
                drain=drains[number],
                kept=cell.forward + turn + back,
                again=cell.recompute + back,
                graph=graphs[number],
            )
        )
    return least


def _work_bound(group: Sequence[_Least], M: int, memory: float) -> float:
    """Returns the least seconds of a step in which a worker does the work of these cells.

    The work begins with a forward of the first cell, which a micro-batch passes first, and so not before its arrival.
    The last urgent backward is one of the first cell, too, which a micro-batch passes last. Then the drain follows, in
    which second halves may run, but no graph lives. So there are two bounds: the work without second halves, and then
    the drain; and all of the work. If all graphs are of one size, only whole ones fill the memory.

    Args:
        group: some cells of a worker, from one on.
        M: micro-batches.
        memory: bytes that the worker has for graphs.
    """
    first, sizes = group[0], {cell.graph for cell in group}
    if max(sizes) > memory:
        return inf
    if memory < inf and len(sizes) == 1 and (size := group[0].graph) > 0:
        memory = size * floor(memory / size * (1 + 1e-12))
    urgent = M * sum(cell.ready + cell.urgent for cell in group)
    whole = M * sum(cell.ready + cell.backward for cell in group)
    return first.arrival + max(
        _with_recompute(group, M, memory, urgent, 0.0) + first.drain,
        _with_recompute(group, M, memory, whole, first.drain),
    )


def _turn_bound(group: Sequence[_Least], M: int) -> float:
    """Returns the least seconds of a step in which a worker waits for the first or the last micro-batch to come back.

    All backwards of the group come after the first micro-batch has been through the later cells and back. All its
    forwards come before the last micro-batch goes there. With M=1 both are the path of one micro-batch.
    """
    first, last = group[0], group[-1]
    turned = last.arrival + last.forward + last.turn
    urgent, whole = M * sum(cell.urgent for cell in group), M * sum(cell.backward for cell in group)
    forwards = first.arrival + M * sum(cell.forward for cell in group)
    return max(turned + urgent + first.drain, turned + whole, forwards + last.turn + last.urgent + last.drain)


def _with_recompute(group: Sequence[_Least], M: int, memory: float, work: float, drain: float) -> float:
    """Returns the least seconds for some work and for the recomputes without which its graphs do not fit the memory.

    The sum of bytes times seconds over all graphs is at most memory times the seconds in which graphs live. A recompute
    shortens the life of a graph and adds seconds. Those that save most bytes times seconds for each second come first,
    and a part of a graph may be recomputed (a fractional knapsack). What is still missing then is idle time. Each added
    second has its memory, too, so the answer needs no bisection.

    Args:
        group: cells whose graphs share the memory.
        M: micro-batches.
        memory: bytes for graphs.
        work: seconds of the work without recomputes.
        drain: seconds, among those of ``work``, in which no graph lives.
    """
    if memory == inf:
        return work
    missing = M * sum(cell.graph * cell.kept for cell in group) - memory * (work - drain)
    saving = [cell for cell in group if cell.graph * (cell.kept - cell.again) > 0]
    for cell in sorted(saving, key=lambda cell: cell.extra / (cell.graph * (cell.kept - cell.again))):
        gain = cell.graph * (cell.kept - cell.again) + memory * cell.extra
        count = min(M, max(0.0, missing) / gain)
        missing, work = missing - count * gain, work + count * cell.extra
    if missing <= 0:
        return work
    return work + missing / memory if memory > 0 else inf
