"""Makes the schedule: every worker's instructions, as plain data (paper, sections 2.2 and 2.3, figure 2c).

The engine runs these lists (a drawing stands in `pipeline/engine.py`), `simulate` times them and `picture` draws them,
so that what is printed is what runs. Their rules stand in `rules.py`; tests check every kind by them.

`instruction.py` has the instructions, `orders.py` the kinds of schedule: an order of units of work for each worker.
Here the units become instructions. A boundary inside a worker is no instruction: a reference, not a message. A send
stands directly after the computation whose result it sends.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby, pairwise

from .instruction import BACK, COMPUTE, Instruction, InstructionLists, Op, ScheduleError
from .orders import KINDS, Unit, runs_of
from .own_lists import is_file, read_lists

REMAT = ("always", "except_last", "never")
_RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)
_CHANGE = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT_GRADIENT: -1}  # of what is kept: until W, with halves


def kept_graphs(policy: str | int | Sequence[int], K: int, M: int) -> tuple[int, ...]:
    """Returns the most graphs that each of K cells keeps, for the argument ``keep`` of `schedule`.

    Args:
        policy: a word of ``REMAT``, a number for all cells, or a number for each cell.
        M: micro-batches per mini-batch.

    Raises:
        ScheduleError: numbers for more or fewer cells.
    """
    if policy == "never":
        return (max(M, 2),) * K  # 1 is except_last, of a single micro-batch too
    if isinstance(policy, str):
        return (REMAT.index(policy),) * K
    keep = (policy,) * K if isinstance(policy, int) else tuple(policy)
    if len(keep) != K:
        raise ScheduleError(f"pipeline.keep={list(keep)} has {len(keep)} numbers but pipeline.K={K}: give one per cell")
    return keep


class StepSchedule:
    """Makes the lists of a training step.

    Args:
        kind, placement, offload: arguments of `schedule`.
        policy: argument of `kept_graphs`.

    Attributes:
        lists: function that returns one list of instructions for each worker, for a number of micro-batches.
    """

    def __init__(
        self, kind: str, placement: Sequence[int], policy: str | int | Sequence[int], offload: bool = False
    ) -> None:
        self.kind, self.placement = kind, placement
        self.lists = cache(lambda M: schedule(kind, placement, M, kept_graphs(policy, len(placement), M), offload))


def schedule(
    kind: str, placement: Sequence[int], M: int, keep: Sequence[int], offload: bool = False
) -> list[list[Instruction]]:
    """Returns the instructions of one training step: one list per worker, in the order of execution.

    Args:
        kind: a key of ``KINDS``, or a file as `own_lists` reads it, which has its own placement and kept graphs.
        placement: ``placement[cell]`` is the cell's worker; workers are counted from 0 and each has a cell.
        M: micro-batches per mini-batch.
        keep: number for each cell of the most graphs that exist at once, a recomputed one included. 0 recomputes every
            micro-batch directly before its backward, so only one of a worker's cells has a graph at a time. 1 keeps the
            graph if the backward directly follows its forward, and otherwise recomputes before the gradient arrives.
            With n of 2 or more, n - 1 graphs stay while other micro-batches go backward. `kept_graphs` makes the
            numbers of a policy.
        offload: cells' state is brought and taken away. `gpipe` then takes all micro-batches through one cell before
            the next.

    Raises:
        ScheduleError: a placement that the kind cannot serve.
    """
    if is_file(kind):
        return read_lists(kind).of(M)
    if offload and kind == "gpipe":
        kind = "breadth_first"  # the same sums; on a worker with several cells one after the other
    lists = _known_lists(kind, tuple(placement), M, tuple(keep))
    return with_moves(lists) if offload else [list(each) for each in lists]


@lru_cache(maxsize=16)  # a search plans many cuts of one list
def _known_lists(kind: str, placement: tuple[int, ...], M: int, keep: tuple[int, ...]) -> list[list[Instruction]]:
    """Returns the lists as `schedule`, from a cache; the caller must not change them."""
    return [_instructions(units, placement, keep) for units in KINDS[kind](placement, M)]


def forward_only(placement: Sequence[int], M: int, offload: bool = False) -> list[list[Instruction]]:
    """Returns the instructions of one evaluation step, for any placement: forwards, receives and sends only.

    A worker with several runs of cells takes as many micro-batches through a run as there are workers before it turns
    to the next one, so that its neighbours always have work. With ``offload`` all go through a cell before the next.
    """
    workers = max(placement) + 1
    if offload:
        ordered = KINDS["breadth_first"](placement, M)
        ways = [[unit for unit in units if unit.op in (Op.FORWARD, Op.RECEIVE_ACTIVATION)] for units in ordered]
        return with_moves([_instructions(units, placement, (0,) * len(placement)) for units in ways])
    lists: list[list[Unit]] = [[] for _ in range(workers)]
    for first in range(0, M, workers):
        for cells in runs_of(placement):
            group = range(first, min(first + workers, M))
            lists[placement[cells[0]]] += [Unit(Op.FORWARD, cells, m) for m in group]
    return [_instructions(units, placement, (0,) * len(placement)) for units in lists]


def most_kept(instructions: Sequence[Instruction]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the most micro-batches that a worker's training list keeps (paper, section 2.3: N + (L/K)·(N/M)).

    Returns:
        For each cell the most micro-batches whose boundary input is kept, from forward to the end of backward (its
        second half, if it has two); and for each cell the most whose graph is kept, from forward or recompute to there.
    """
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    inputs, graphs = (Counter({i.cell: 0 for i in instructions}) for _ in range(2))
    most_inputs, most_graphs = dict(inputs), dict(graphs)
    for i in instructions:
        change = _CHANGE.get(i.op, 0)
        forgets_its_graph = i.op is Op.FORWARD and (i.cell, i.micro_batch) in recomputed
        inputs[i.cell] += change
        graphs[i.cell] += 0 if forgets_its_graph else 1 if i.op is Op.RECOMPUTE else change
        most_inputs[i.cell] = max(most_inputs[i.cell], inputs[i.cell])
        most_graphs[i.cell] = max(most_graphs[i.cell], graphs[i.cell])
    return most_inputs, most_graphs


def _instructions(units: Sequence[Unit], placement: Sequence[int], keep: Sequence[int]) -> list[Instruction]:
    """Returns one worker's instructions: its units of work with their receives, recomputes and sends."""
    kept: dict[int, set[int]] = {}
    for cells in {unit.cells for unit in units}:
        by_number = {most: _kept(units, cells, most) for most in {keep[cell] for cell in cells}}
        kept |= {cell: by_number[keep[cell]] for cell in cells}
    made: list[Instruction] = []
    received = {Instruction(unit.op, unit.cells[0], unit.micro_batch) for unit in units if unit.op in _RECEIVES}
    for unit in units:
        if unit.op in _RECEIVES:
            made.append(Instruction(unit.op, unit.cells[0], unit.micro_batch))
        elif unit.op is Op.FORWARD:
            made += (i for i in _forward(unit, placement) if i not in received)
        elif unit.op is Op.WEIGHT_GRADIENT:
            made += [Instruction(unit.op, cell, unit.micro_batch) for cell in reversed(unit.cells)]
        else:
            again = {cell for cell in unit.cells if unit.micro_batch not in kept[cell]}
            early = {cell for cell in again if keep[cell] or cell == unit.cells[-1]}
            made += (i for i in _backward(unit, placement, again, early) if i not in received)
    return made


def _kept(units: Sequence[Unit], cells: tuple[int, ...], most: int) -> set[int]:
    """Returns the micro-batches whose graph in these consecutive cells is kept from forward to backward.

    All others are recomputed, so their graph exists at its backward only. While another micro-batch goes backward, at
    most ``most - 1`` kept graphs stay. They are those whose backward comes first, which keeps as many as possible.

    Args:
        units: the worker's units of work.
        most: the most graphs that exist at once.
    """
    if most < 2:
        backs = (unit for before, unit in pairwise(units) if before == Unit(Op.FORWARD, cells, unit.micro_batch))
        return {unit.micro_batch for unit in backs if most and unit.op in BACK and unit.cells == cells}
    own = [unit for unit in units if unit.cells == cells]
    ends = {unit.micro_batch: place for place, unit in enumerate(own) if unit.op in BACK}
    kept, alive = set(), list[int]()  # alive: the ends of kept graphs, in order
    for place, unit in enumerate(own):
        if unit.op is Op.FORWARD:
            insort(alive, ends[unit.micro_batch])
        elif unit.op in BACK:
            if alive and alive[0] == place:
                kept.add(unit.micro_batch)
                del alive[0]
            del alive[most - 1 :]
    return kept


def _forward(unit: Unit, placement: Sequence[int]) -> Iterator[Instruction]:
    """Yields the forwards of a unit, with the receive before them and the send behind them."""
    for cell in unit.cells:
        if cell > 0 and placement[cell - 1] != placement[cell]:
            yield Instruction(Op.RECEIVE_ACTIVATION, cell, unit.micro_batch)
        yield Instruction(Op.FORWARD, cell, unit.micro_batch)
        if cell + 1 < len(placement) and placement[cell + 1] != placement[cell]:
            yield Instruction(Op.SEND_ACTIVATION, cell, unit.micro_batch)


def _backward(unit: Unit, placement: Sequence[int], again: set[int], early: set[int]) -> Iterator[Instruction]:
    """Yields the backwards of a unit with their recomputes, receive and send.

    Args:
        again: cells that recompute.
        early: those that recompute before the gradient arrives, when the worker would be idle (section 2.3).
    """
    for cell in reversed(unit.cells):
        if cell in early:
            yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
    for cell in reversed(unit.cells):
        if cell + 1 < len(placement) and placement[cell + 1] != placement[cell]:
            yield Instruction(Op.RECEIVE_GRADIENT, cell, unit.micro_batch)
        if cell in again and cell not in early:
            yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
        yield Instruction(unit.op, cell, unit.micro_batch)
        if cell > 0 and placement[cell - 1] != placement[cell]:
            yield Instruction(Op.SEND_GRADIENT, cell, unit.micro_batch)


# -- cells that come and go (`pipeline.offload`) ---------------------------------------------------------------------


def with_moves(lists: InstructionLists) -> list[list[Instruction]]:
    """Returns the lists with moves of cells' state: brought while another cell runs, taken away after the own run.

    Raises:
        ScheduleError: a cell would be brought more than twice; says which kinds serve.
    """
    return [_with_moves(worker, instructions) for worker, instructions in enumerate(lists)]


def _with_moves(worker: int, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Returns one worker's list with moves of state; see `with_moves`.

    A turn is a run of computations of one cell. When it begins, the next turn's cell is brought; at the first turn its
    own cell, too. A cell is taken away behind its turn and the sends of its results.
    """
    computations = [(at, i) for at, i in enumerate(instructions) if i.op in COMPUTE]
    turns = [list(turn) for _, turn in groupby(computations, key=lambda pair: pair[1].cell)]
    cells = {i.cell for _, i in computations}
    if len(turns) > 2 * len(cells):
        raise ScheduleError(
            f"pipeline.offload=true: worker {worker} would turn {len(turns)} times a step from one of its {len(cells)} "
            "cells to another: use pipeline.schedule=breadth_first or gpipe, or one cell a worker"
        )
    before: dict[int, list[Instruction]] = {}  # moves by the position in the list before which they are inserted
    for number, turn in enumerate(turns):
        (first, begin), (last, end) = turn[0], turn[-1]
        needed = [later[0][1] for later in turns[number + 1 : number + 2]]  # the next turn's first computation
        if number == 0:
            needed.insert(0, begin)
        before.setdefault(first, []).extend(Instruction(Op.BRING, i.cell, i.micro_batch) for i in needed)
        behind = last + 1
        while behind < len(instructions) and instructions[behind].sent_message is not None:
            behind += 1
        before.setdefault(behind, []).append(Instruction(Op.TAKE_AWAY, end.cell, end.micro_batch))
    made: list[Instruction] = []
    for at, instruction in enumerate(instructions):
        made += [*before.get(at, ()), instruction]
    return made + before.get(len(instructions), [])
