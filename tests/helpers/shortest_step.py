"""Finds the shortest step of a small pipeline: tries every order of the work and every choice of what is made again.

It shares nothing with `gpipe_cli.planner.bound` but the description of a cell. A graph fills memory from the beginning
of the operation that makes it to the end of its backward, or of the first half.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from gpipe_cli.planner.bound import CellLoad

FORWARD, KEEPING, RECOMPUTE, BACKWARD, INPUT, WEIGHT = range(6)
SECONDS = ("inference", "forward", "recompute", "backward", "input_gradient", "weight_gradient")


class Running(NamedTuple):
    """Describes an operation under way."""

    seconds: int  # left
    op: int
    cell: int


class Batch(NamedTuple):
    """Describes how far a micro-batch is: forwards and backwards that have ended, cells with a graph as bits."""

    forward: int
    back: int
    graphs: int
    running: tuple[Running, ...]


class State(NamedTuple):
    """Describes a moment of a step, in which micro-batches have no names."""

    batches: tuple[Batch, ...]
    due: tuple[int, ...]  # weight gradients of each cell that have not begun
    weights: tuple[Running, ...]  # those under way


class Search:
    """Looks at states in the order of the time that a step takes by them at least; arguments as of `step_bound`."""

    def __init__(
        self, cells: Sequence[CellLoad], placement: Sequence[int], M: int, memory: Sequence[float], halves: bool
    ) -> None:
        self._cells, self._placement, self._M, self._memory, self._halves = cells, placement, M, memory, halves
        self._seconds = [[int(getattr(cell, name)) for name in SECONDS] for cell in cells]

    def shortest(self, most: int = 1 << 22) -> int | None:
        """Returns the time of the shortest step; None where nothing fits.

        Args:
            most: states after which it gives up.

        Raises:
            TimeoutError: it gives up.
        """
        first = State((Batch(0, 0, 0, ()),) * self._M, (0,) * len(self._cells), ())
        order, done = count(), set()
        waiting = [(self._rest(first), next(order), 0, first)]
        while waiting:
            least, _, now, state = heapq.heappop(waiting)
            if state in done:
                continue
            done.add(state)
            if len(done) > most:
                raise TimeoutError(f"{most} states and no end, before {least}")
            backs = {batch.back for batch in state.batches}
            if backs == {len(self._cells)} and not any(state.due) and not state.weights:
                return now
            for begun in self._begin(state, 0):
                running = [each for batch in begun.batches for each in batch.running] + list(begun.weights)
                if running:
                    seconds = min(each.seconds for each in running)
                    later = self._after(begun, seconds)
                    if later not in done:
                        at = now + seconds
                        heapq.heappush(waiting, (at + self._rest(later), -next(order), at, later))
        return None

    def _begin(self, state: State, worker: int) -> Iterator[State]:
        """Yields the states in which each idle worker from ``worker`` on begins something, or waits."""
        if worker == len(self._memory):
            yield state
            return
        yield from self._begin(state, worker + 1)
        running = [each for batch in state.batches for each in batch.running] + list(state.weights)
        if all(self._placement[each.cell] != worker for each in running):
            for begun in self._choices(state, worker):
                yield from self._begin(begun, worker + 1)

    def _choices(self, state: State, worker: int) -> Iterator[State]:
        own = [cell for cell, of in enumerate(self._placement) if of == worker]
        held = sum(self._cells[cell].graph for batch in state.batches for cell in own if batch.graphs >> cell & 1)
        for batch in set(state.batches):
            rest = list(state.batches)
            rest.remove(batch)
            for op, cell in self._possible(batch, own):
                graphs = batch.graphs
                if op in (KEEPING, RECOMPUTE):
                    graphs |= 1 << cell
                    if held + self._cells[cell].graph > self._memory[worker]:
                        continue
                running = tuple(sorted([*batch.running, Running(self._seconds[cell][op], op, cell)]))
                begun = Batch(batch.forward, batch.back, graphs, running)
                yield state._replace(batches=tuple(sorted([*rest, begun])))
        for cell in own:
            if state.due[cell]:
                due = tuple(number - (of == cell) for of, number in enumerate(state.due))
                begins = Running(self._seconds[cell][WEIGHT], WEIGHT, cell)
                yield state._replace(due=due, weights=tuple(sorted([*state.weights, begins])))

    def _possible(self, batch: Batch, own: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields operation and cell of what a micro-batch allows; recomputing may run beside other cells' work."""
        K, again = len(self._cells), {each.cell for each in batch.running if each.op == RECOMPUTE}
        passing = len(batch.running) > len(again)
        for cell in own:
            has_graph, had_backward = batch.graphs >> cell & 1, cell >= K - batch.back
            if cell == batch.forward and not passing:
                yield FORWARD, cell
                yield KEEPING, cell
            elif cell < batch.forward and not had_backward and not has_graph:
                yield RECOMPUTE, cell
            elif batch.forward == K and cell == K - 1 - batch.back and has_graph and cell not in again and not passing:
                yield BACKWARD, cell
                if self._halves:
                    yield INPUT, cell

    def _after(self, state: State, seconds: int) -> State:
        """Returns the state some seconds later, when operations have ended."""
        due = list(state.due)
        batches = []
        for forward, back, graphs, running in state.batches:
            for left, op, cell in running:
                if left == seconds:
                    forward += op in (FORWARD, KEEPING)
                    if op in (BACKWARD, INPUT):
                        back, graphs = back + 1, graphs & ~(1 << cell)
                    due[cell] += op == INPUT
            batches.append(Batch(forward, back, graphs, _left(running, seconds)))
        return State(tuple(sorted(batches)), tuple(due), _left(state.weights, seconds))

    def _rest(self, state: State) -> int:
        """Returns the seconds that some worker still computes at least."""
        rest = [0] * len(self._memory)
        for each in state.weights:
            rest[self._placement[each.cell]] += each.seconds
        for cell, (worker, seconds) in enumerate(zip(self._placement, self._seconds, strict=True)):
            whole = seconds[BACKWARD]
            if self._halves:
                whole = min(whole, seconds[INPUT] + seconds[WEIGHT])
            forwards = sum(batch.forward <= cell for batch in state.batches)
            backwards = sum(batch.back < len(self._cells) - cell for batch in state.batches)
            rest[worker] += forwards * min(seconds[FORWARD], seconds[KEEPING]) + backwards * whole
            rest[worker] += state.due[cell] * seconds[WEIGHT]
            for each in (each for batch in state.batches for each in batch.running if each.cell == cell):
                rest[worker] += each.seconds
                if each.op in (FORWARD, KEEPING):
                    rest[worker] -= min(seconds[FORWARD], seconds[KEEPING])
                elif each.op in (BACKWARD, INPUT):
                    rest[worker] += (each.op == INPUT) * seconds[WEIGHT] - whole
        return max(rest)


def _left(running: Sequence[Running], seconds: int) -> tuple[Running, ...]:
    return tuple(each._replace(seconds=each.seconds - seconds) for each in running if each.seconds > seconds)
