"""Defines the kinds of schedule: the order of each worker's units of work, and the placements that each kind allows.

| kind | bubble of equal cells, without recompute | micro-batches whose activations a worker keeps, at most |
|---|---|---|
| gpipe | (W-1)(F+B) | M |
| 1f1b | (W-1)(F+B) | W-w on worker w |
| interleaved_1f1b, v cells a worker | (W-1)(F+B)/v | about W + (W-1)/v |
| breadth_first, v cells a worker | (W-1)(F+B)/v | v M |
| zero_bubble | (W-1)(F+I-W') | W |

F, B, I and W' are the times of a worker's forward, backward, and the two halves of its backward; M >= W.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .instruction import Op, send_window


@dataclass(frozen=True)
class Unit:
    """Describes a unit of work: one direction of one micro-batch through consecutive cells of a worker.

    A kind of schedule is only an order of units; receives, recomputes and sends follow from the placement and the
    numbers of kept graphs (`schedule.py`). A receive is a unit only where it stands earlier than before its use.
    """

    op: Op  # FORWARD, BACKWARD, INPUT_GRADIENT or WEIGHT_GRADIENT; RECEIVE_ACTIVATION or RECEIVE_GRADIENT
    cells: tuple[int, ...]  # ascending, all on one worker
    micro_batch: int


def gpipe(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Orders as the paper does: all forwards, then all backwards, the last micro-batch first (section 2.2)."""
    runs = runs_of(placement)
    return [_each(Op.FORWARD, cells, M) + _each(Op.BACKWARD, cells, M)[::-1] for cells in runs]


def one_forward_one_backward(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Starts worker w of W with W-1-w forwards, then alternates: at most W-w micro-batches are kept, for any M."""
    runs = runs_of(placement)
    return [
        _alternate(_each(Op.FORWARD, cells, M), _each(Op.BACKWARD, cells, M), len(runs) - 1 - worker)
        for worker, cells in enumerate(runs)
    ]


def interleaved(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Runs 1F1B over v cells on each worker, cell c on worker c mod W: the pipeline fills in v times smaller steps.

    Micro-batches go in groups of at least W. A worker takes a group through its first cell, then through the next, and
    goes backward in the same order, from the last cell. Narayanan et al. 2021 ("Efficient Large-Scale Language Model
    Training on GPU Clusters"), section 2.2, where M must be a multiple of W; here the groups may be uneven.
    """
    K, workers = len(placement), max(placement) + 1
    if workers in (1, K):  # each worker has one run of cells
        return one_forward_one_backward(placement, M)
    groups = _groups(M, workers)
    lists = []
    for worker in range(workers):
        cells = [cell for cell in range(K) if placement[cell] == worker]
        forwards = [Unit(Op.FORWARD, (cell,), m) for group in groups for cell in cells for m in group]
        backwards = [Unit(Op.BACKWARD, (cell,), m) for group in groups for cell in reversed(cells) for m in group]
        warm_up = (len(cells) - 1) * len(groups[0]) + 2 * (workers - 1 - worker)
        lists.append(_alternate(forwards, backwards, warm_up))
    return lists


def breadth_first(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Takes all micro-batches through a cell before the next, cell c on worker c mod W; backward in reverse.

    A worker turns to a cell twice a step, however many micro-batches there are. After Lamy-Poirier 2022 ("Breadth-First
    Pipeline Parallelism"). The last worker sends inputs of the first worker's next cell while that still runs the cell
    before. So the first worker receives them early; else the last would wait for room to send. In backward the last
    worker receives early from the first.
    """
    K, workers = len(placement), max(placement) + 1
    in_rounds = [*placement[:workers]] == [*range(workers)] and workers > 1
    # Units before its own at which a message is received:
    lead = M - workers - send_window(workers) // 2 if in_rounds else 0
    lists = []
    for worker in range(workers):
        cells = [cell for cell in range(K) if placement[cell] == worker]
        forwards = [unit for cell in cells for unit in _each(Op.FORWARD, (cell,), M)]
        backwards = [unit for cell in reversed(cells) for unit in _each(Op.BACKWARD, (cell,), M)[::-1]]
        if lead > 0 and worker == 0:
            forwards = _receiving_early(forwards, Op.RECEIVE_ACTIVATION, M, lead)
        if lead > 0 and worker == workers - 1:
            backwards = _receiving_early(backwards, Op.RECEIVE_GRADIENT, M, lead)
        lists.append(forwards + backwards)
    return lists


def zero_bubble(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Runs 1F1B with the backward in two halves; the weights' half, which no worker waits for, fills the idle time.

    Worker w puts off the weight gradients of w micro-batches, so that every worker keeps at most W micro-batches, as
    many as the first worker does under 1f1b. After ZB-H1 of Qi et al. 2023 ("Zero Bubble Pipeline Parallelism").
    """
    runs = runs_of(placement)
    lists = []
    for worker, cells in enumerate(runs):
        ahead = len(runs) - 1 - worker
        units = _alternate(_each(Op.FORWARD, cells, M), _each(Op.INPUT_GRADIENT, cells, M), ahead)
        put_off: list[Unit] = []
        made: list[Unit] = []
        for unit in units:
            made.append(unit)
            if unit.op is Op.INPUT_GRADIENT:
                put_off.append(Unit(Op.WEIGHT_GRADIENT, cells, unit.micro_batch))
                if len(put_off) > worker:
                    made.append(put_off.pop(0))
        lists.append(made + put_off)
    return lists


KINDS: dict[str, Callable[[Sequence[int], int], list[list[Unit]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved,
    "breadth_first": breadth_first,
    "zero_bubble": zero_bubble,
}


def runs_of(placement: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the cells in runs: consecutive cells on one worker form a run."""
    runs: list[tuple[int, ...]] = []
    for cell, worker in enumerate(placement):
        if cell > 0 and placement[cell - 1] == worker:
            runs[-1] += (cell,)
        else:
            runs.append((cell,))
    return runs


def _each(op: Op, cells: tuple[int, ...], M: int) -> list[Unit]:
    """Returns the units of all micro-batches, in order."""
    return [Unit(op, cells, m) for m in range(M)]


def _receiving_early(units: Sequence[Unit], receive: Op, first: int, lead: int) -> list[Unit]:
    """Returns the units with early receives: that of each unit from ``first`` on stands ``lead`` units before it."""
    made: list[Unit] = []
    for position, unit in enumerate(units):
        if first <= position + lead < len(units):
            made.append(replace(units[position + lead], op=receive))
        made.append(unit)
    return made


def _alternate(forwards: Sequence[Unit], backwards: Sequence[Unit], warm_up: int) -> list[Unit]:
    """Returns ``warm_up`` forwards, then forward and backward in turn, then the remaining backwards."""
    units = list(forwards[:warm_up])
    for number, backward in enumerate(backwards):
        units += forwards[warm_up + number : warm_up + number + 1]
        units.append(backward)
    return units


def _groups(M: int, workers: int) -> list[range]:
    """Returns 0 … M-1 in groups of W or a little more, the larger groups first; one group where M < W."""
    number = max(1, M // workers)
    size, larger = divmod(M, number)
    starts = [size * i + min(i, larger) for i in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
