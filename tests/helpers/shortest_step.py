"""Finds the shortest step of a small pipeline: tries every order of the work and every choice of what is made again.

It shares nothing with `gpipe_cli.planner.bound`. A graph fills memory from the beginning
of the operation that makes it to the end of its backward, or of the first half. Operations are begun one by one, in the
order of their times, each as soon as its worker and its micro-batch allow: some such order is the shortest step.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from gpipe_cli.partition.cost import LayerTimes


@dataclass(frozen=True)
class CellLoad(LayerTimes):
    """Holds the seconds of one micro-batch in a cell, and the bytes of its graph."""

    graph: float


class Batch(NamedTuple):
    """Describes how far a micro-batch is: forwards and backwards that have begun, cells with a graph as bits."""

    forward: int = 0
    back: int = 0
    graphs: int = 0
    ready: float = 0  # when the last of them ends


class State(NamedTuple):
    """Describes what has begun; micro-batches have no names, and times count from the last beginning."""

    batches: tuple[Batch, ...]
    due: tuple[int, ...]  # weight gradients of each cell that have not begun
    free: tuple[float, ...]  # when each worker has done what it has begun


class ShortestStep:
    """Looks at states in the order of the time that a step takes by them at least; arguments as of `step_bound`."""

    def __init__(self, cells: Sequence[CellLoad], placement: Sequence[int], M: int, memory: Sequence[float]) -> None:
        self._cells, self._placement, self._M, self._memory = cells, placement, M, memory

    def shortest(self) -> float | None:
        """Returns the time of the shortest step; None where nothing fits."""
        first = State((Batch(),) * self._M, (0,) * len(self._cells), (0.0,) * len(self._memory))
        order, done = count(), set()
        waiting = [(self._rest(first), next(order), 0.0, first)]
        while waiting:
            least, _, now, state = heapq.heappop(waiting)
            if {batch.back for batch in state.batches} == {len(self._cells)} and not any(state.due):
                return least
            if state not in done:
                done.add(state)
                for seconds, later in self._later(state):
                    heapq.heappush(waiting, (now + seconds + self._rest(later), -next(order), now + seconds, later))
        return None

    def _later(self, state: State) -> Iterator[tuple[float, State]]:
        """Yields the states with one operation more, and the time of its beginning."""
        for cell, (worker, load) in enumerate(zip(self._placement, self._cells, strict=True)):
            if state.due[cell]:
                yield self._begin(state, cell, state.free[worker], load.weight_gradient, owed=-1)
            own = [number for number, of in enumerate(self._placement) if of == worker]
            held = sum(self._cells[one].graph for batch in state.batches for one in own if batch.graphs >> one & 1)
            fits, bit = held + load.graph <= self._memory[worker], 1 << cell
            for batch in set(state.batches):
                forward, back, graphs, ready = batch
                soon, has_graph = max(ready, state.free[worker]), graphs & bit
                if cell == forward:
                    further = Batch(forward + 1, back, graphs, soon + load.inference)
                    yield self._begin(state, cell, soon, load.inference, (batch, further))
                    if fits:
                        further = Batch(forward + 1, back, graphs | bit, soon + load.forward)
                        yield self._begin(state, cell, soon, load.forward, (batch, further))
                elif cell < min(forward, len(self._cells) - back) and not has_graph and fits:
                    further = batch._replace(graphs=graphs | bit)
                    yield self._begin(state, cell, state.free[worker], load.recompute, (batch, further))
                elif forward == len(self._cells) == cell + 1 + back and has_graph:
                    for seconds, owed in ((load.backward, 0), (load.input_gradient, 1)):
                        further = Batch(forward, back + 1, graphs - bit, soon + seconds)
                        yield self._begin(state, cell, soon, seconds, (batch, further), owed)

    def _begin(
        self, state: State, cell: int, at: float, seconds: float, change: Sequence[Batch] = (), owed: int = 0
    ) -> tuple[float, State]:
        """Begins an operation; ``change``: its micro-batch before and after."""
        batches, due, free = list(state.batches), list(state.due), list(state.free)
        if change:
            batches[batches.index(change[0])] = change[1]
        due[cell] += owed
        free[self._placement[cell]] = at + seconds
        moved = (each._replace(ready=max(0, each.ready - at)) for each in batches)
        return at, State(tuple(sorted(moved)), tuple(due), tuple(max(0, each - at) for each in free))

    def _rest(self, state: State) -> float:
        """Returns the seconds after which the last worker can have done all at the earliest."""
        rest = [*state.free]
        for cell, (worker, load) in enumerate(zip(self._placement, self._cells, strict=True)):
            backward = min(load.backward, load.input_gradient + load.weight_gradient)
            for forward, back, graphs, _ in state.batches:
                rest[worker] += min(load.inference + load.recompute, load.forward) if forward <= cell else 0
                if back < len(self._cells) - cell:
                    rest[worker] += backward + (load.recompute if forward > cell and not graphs >> cell & 1 else 0)
            rest[worker] += state.due[cell] * load.weight_gradient
        return max(rest)
