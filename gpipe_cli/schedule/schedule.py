"""Makes the schedule: every worker's instructions, as plain data (paper, sections 2.2 and 2.3, figure 2c).

The engine runs these lists (a drawing stands in `pipeline/engine.py`), `simulate` times them and `picture` draws them,
so that what is printed is what runs. Their rules are checked by tests (`tests/helpers/schedule_rules.py`).

`instruction.py` has the instructions, `orders.py` the kinds of schedule: an order of units of work for each worker.
Here the units become instructions. A boundary inside a worker is no instruction: a reference, not a message. A send
stands directly after the computation whose result it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .instruction import Instruction, Op, ScheduleError
from .orders import KINDS, Unit, runs_of

REMAT = ("always", "except_last", "never")
GRADIENTS = (Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.SEND_GRADIENT)  # they make or send gradients
_CHANGE = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT_GRADIENT: -1}  # of what is kept: until W, with halves


def schedule(kind: str, placement: Sequence[int], M: int, remat: str) -> list[list[Instruction]]:
    """Returns the instructions of one training step: one list per worker, in the order of execution.

    Args:
        kind: a key of ``KINDS``.
        placement: ``placement[cell]`` is the cell's worker; workers are counted from 0 and each has a cell.
        M: micro-batches per mini-batch.
        remat: ``always`` recomputes each cell directly before its backward (one cell's internals are kept at a
            time), ``except_last`` keeps the graph where a backward directly follows its forward and otherwise
            recomputes the worker's cells before the gradient arrives, ``never`` keeps every graph.

    Raises:
        ScheduleError: an unknown kind or policy, M < 1, or a placement that the kind cannot serve.
    """
    if kind not in KINDS:
        raise ScheduleError(f"unknown kind of schedule {kind!r}: use {', '.join(KINDS)}")
    if remat not in REMAT:
        raise ScheduleError(f"pipeline.remat={remat}: use {', '.join(REMAT)}")
    _check_sizes(placement, M)
    return [_instructions(units, placement, remat) for units in KINDS[kind](placement, M)]


def gradients_complete(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Returns the cells of a list by the position of the last instruction that makes or sends their gradients."""
    last = {i.cell: position for position, i in enumerate(instructions) if i.op in GRADIENTS}
    return {position: cell for cell, position in last.items()}


def forward_only(placement: Sequence[int], M: int) -> list[list[Instruction]]:
    """Returns the instructions of one evaluation step, for any placement: forwards, receives and sends only.

    A worker with several runs of cells takes as many micro-batches through a run as there are workers before it turns
    to the next one, so that its neighbours always have work.
    """
    _check_sizes(placement, M)
    workers = max(placement) + 1
    lists: list[list[Unit]] = [[] for _ in range(workers)]
    for first in range(0, M, workers):
        for cells in runs_of(placement):
            group = range(first, min(first + workers, M))
            lists[placement[cells[0]]] += [Unit(Op.FORWARD, cells, m) for m in group]
    return [_instructions(units, placement, "never") for units in lists]


@dataclass(frozen=True)
class Kept:
    """Holds the most that one worker keeps at any moment of a step.

    Attributes:
        inputs: cell -> micro-batches whose boundary input is kept, from forward to the end of backward (its
            second half, where it has two).
        graphs: cell -> micro-batches whose graph is kept, from forward (or recompute) to there.
        together: graphs of all its cells at the same time.
    """

    inputs: dict[int, int]
    graphs: dict[int, int]
    together: int


def most_kept(instructions: Sequence[Instruction]) -> Kept:
    """Returns what a worker has to keep in memory, by its training list (paper, section 2.3: N + (L/K)·(N/M))."""
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    inputs, graphs = (Counter({i.cell: 0 for i in instructions}) for _ in range(2))
    most_inputs, most_graphs, together = dict(inputs), dict(graphs), 0
    for i in instructions:
        change = _CHANGE.get(i.op, 0)
        forgets_its_graph = i.op is Op.FORWARD and (i.cell, i.micro_batch) in recomputed
        inputs[i.cell] += change
        graphs[i.cell] += 0 if forgets_its_graph else 1 if i.op is Op.RECOMPUTE else change
        most_inputs[i.cell] = max(most_inputs[i.cell], inputs[i.cell])
        most_graphs[i.cell] = max(most_graphs[i.cell], graphs[i.cell])
        together = max(together, graphs.total())
    return Kept(most_inputs, most_graphs, together)


def _instructions(units: Sequence[Unit], placement: Sequence[int], remat: str) -> list[Instruction]:
    """Returns one worker's units with their receives, recomputes and sends."""
    made: list[Instruction] = []
    before: Unit | None = None
    for unit in units:
        if unit.op is Op.FORWARD:
            made += _forward(unit, placement)
        elif unit.op is Op.WEIGHT_GRADIENT:
            made += [Instruction(unit.op, cell, unit.micro_batch) for cell in reversed(unit.cells)]
        else:
            follows_its_forward = before == Unit(Op.FORWARD, unit.cells, unit.micro_batch)
            recompute = remat == "always" or (remat == "except_last" and not follows_its_forward)
            early = () if not recompute else unit.cells[-1:] if remat == "always" else unit.cells
            made += _backward(unit, placement, recompute, early)
        before = unit
    return made


def _forward(unit: Unit, placement: Sequence[int]) -> Iterator[Instruction]:
    for cell in unit.cells:
        if cell > 0 and placement[cell - 1] != placement[cell]:
            yield Instruction(Op.RECEIVE_ACTIVATION, cell, unit.micro_batch)
        yield Instruction(Op.FORWARD, cell, unit.micro_batch)
        if cell + 1 < len(placement) and placement[cell + 1] != placement[cell]:
            yield Instruction(Op.SEND_ACTIVATION, cell, unit.micro_batch)


def _backward(unit: Unit, placement: Sequence[int], recompute: bool, early: Sequence[int]) -> Iterator[Instruction]:
    """Yields a backward; ``early`` cells are recomputed before the gradient arrives, in idle time (section 2.3)."""
    for cell in reversed(early):
        yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
    for cell in reversed(unit.cells):
        if cell + 1 < len(placement) and placement[cell + 1] != placement[cell]:
            yield Instruction(Op.RECEIVE_GRADIENT, cell, unit.micro_batch)
        if recompute and cell not in early:
            yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
        yield Instruction(unit.op, cell, unit.micro_batch)
        if cell > 0 and placement[cell - 1] != placement[cell]:
            yield Instruction(Op.SEND_GRADIENT, cell, unit.micro_batch)


def _check_sizes(placement: Sequence[int], M: int) -> None:
    if M < 1:
        raise ScheduleError(f"pipeline.M={M}: a step needs at least one micro-batch; use pipeline.M=1 or more")
    if not placement or set(placement) != set(range(max(placement) + 1)):
        raise ScheduleError(
            f"placement {list(placement)}: give each cell a worker, counted from 0, so that every worker has a cell"
        )
