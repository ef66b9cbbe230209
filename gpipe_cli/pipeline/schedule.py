"""The schedule: every worker's instructions, as plain data (paper, sections 2.2 and 2.3, figure 2c).

One pure function makes the lists. The engine runs them, ``simulate`` times them, ``picture`` draws them and
``validate`` checks them, so that what is printed is what runs. One step of ``gpipe`` with K=3 cells on three workers,
M=3 micro-batches and remat ``except_last``, as ``picture.draw_text`` prints it (F forward, R recompute, B backward):

    worker 0 | F0 F1 F2  .  .  .  . B2 R1 B1 R0 B0     [1] the forwards in micro-batch order
    worker 1 |  . F0 F1 F2  .  . B2 R1 B1 R0 B0  .     [2] the last one comes back first: its graph was kept
    worker 2 |  .  . F0 F1 F2 B2 R1 B1 R0 B0  .  .     [3] the others are recomputed before their gradient arrives

An instruction prints as its code, its cell and its micro-batch, ``F2.0`` or ``sa1.3``, and parses back:

| code | instruction | meaning for cell k |
|---|---|---|
| F | FORWARD | runs F_k |
| R | RECOMPUTE | runs F_k again from its kept input, now keeping the graph |
| B | BACKWARD | runs B_k, adding to the gradients of the cell's weights |
| sa | SEND_ACTIVATION | sends k's output to the worker of cell k+1 |
| ra | RECEIVE_ACTIVATION | waits for k's input |
| sg | SEND_GRADIENT | sends the gradient of k's input to the worker of cell k-1 |
| rg | RECEIVE_GRADIENT | waits for the gradient of k's output |

A boundary inside a worker is no instruction: a reference, not a message. A send stands directly after what produced it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


class ScheduleError(ValueError):
    """A schedule that cannot be made, or lists of instructions that break its rules."""


class Op(enum.Enum):
    """What an instruction does; the value is its code in print."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    SEND_ACTIVATION = "sa"
    RECEIVE_ACTIVATION = "ra"
    SEND_GRADIENT = "sg"
    RECEIVE_GRADIENT = "rg"


COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD)
REMAT = ("always", "except_last", "never")
_PRINTED = re.compile(rf"({'|'.join(op.value for op in Op)})(\d+)\.(\d+)")


@dataclass(frozen=True, repr=False)
class Instruction:
    """One thing that a worker does, for one micro-batch of one cell (both counted from 0)."""

    op: Op
    cell: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.cell}.{self.micro_batch}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Reads what ``str`` printed. Raises ScheduleError for any other text."""
        match = _PRINTED.fullmatch(text)
        if match is None:
            codes = ", ".join(op.value for op in Op)
            raise ScheduleError(f"{text!r} is no instruction: write it as F2.0 or sa1.3; codes: {codes}")
        return cls(Op(match[1]), int(match[2]), int(match[3]))

    @property
    def sent_message(self) -> Message | None:
        """The message that this instruction sends, if it is a send."""
        if self.op is Op.SEND_ACTIVATION:
            return ("activation", self.cell, self.micro_batch)
        if self.op is Op.SEND_GRADIENT:
            return ("gradient", self.cell - 1, self.micro_batch)
        return None

    @property
    def awaited_message(self) -> Message | None:
        """The message that this instruction waits for, if it is a receive."""
        if self.op is Op.RECEIVE_ACTIVATION:
            return ("activation", self.cell - 1, self.micro_batch)
        if self.op is Op.RECEIVE_GRADIENT:
            return ("gradient", self.cell, self.micro_batch)
        return None


Message = tuple[str, int, int]  # "activation" or "gradient", the cell before the boundary, the micro-batch
InstructionLists = Sequence[Sequence[Instruction]]


@dataclass(frozen=True)
class Unit:
    """What a worker does without looking left or right: one direction of one micro-batch through consecutive cells.

    A kind of schedule is only an order of units; receives, recomputes and sends follow from the placement and the
    re-materialization policy.
    """

    op: Op  # FORWARD or BACKWARD
    cells: tuple[int, ...]  # ascending, all on one worker
    micro_batch: int


def gpipe(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """The paper's order: all forwards, then all backwards, the last micro-batch first (section 2.2)."""
    return [
        [Unit(Op.FORWARD, cells, m) for m in range(M)] + [Unit(Op.BACKWARD, cells, m) for m in reversed(range(M))]
        for cells in _one_run_per_worker("gpipe", placement)
    ]


def one_forward_one_backward(placement: Sequence[int], M: int) -> list[list[Unit]]:
    """Worker w of W warms up with W-1-w forwards, then alternates: at most W-w micro-batches are kept, whatever M."""
    runs = _one_run_per_worker("1f1b", placement)
    lists = []
    for worker, cells in enumerate(runs):
        warm_up = min(M, len(runs) - 1 - worker)
        units = [Unit(Op.FORWARD, cells, m) for m in range(warm_up)]
        for m in range(M):
            if m + warm_up < M:
                units.append(Unit(Op.FORWARD, cells, m + warm_up))
            units.append(Unit(Op.BACKWARD, cells, m))
        lists.append(units)
    return lists


KINDS: dict[str, Callable[[Sequence[int], int], list[list[Unit]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def schedule(kind: str, placement: Sequence[int], M: int, remat: str) -> list[list[Instruction]]:
    """The instructions of one training step.

    Args:
        kind: a key of ``KINDS``.
        placement: ``placement[cell]`` is the cell's worker; workers are counted from 0 and each has a cell.
        M: micro-batches per mini-batch.
        remat: ``always`` recomputes each cell directly before its backward (one cell's internals are kept at a
            time), ``except_last`` keeps the graph where a micro-batch comes back right after its forward and else
            recomputes the worker's cells before the gradient arrives, ``never`` keeps every graph.

    Returns:
        One list per worker, in the order of execution.

    Raises:
        ScheduleError: an unknown kind or policy, M < 1, or a placement that the kind cannot serve.
    """
    if kind not in KINDS:
        raise ScheduleError(f"unknown kind of schedule {kind!r}: use {' or '.join(KINDS)}")
    if remat not in REMAT:
        raise ScheduleError(f"pipeline.remat={remat}: use {', '.join(REMAT)}")
    _check_sizes(placement, M)
    return [_instructions(units, placement, remat) for units in KINDS[kind](placement, M)]


def forward_only(placement: Sequence[int], M: int) -> list[list[Instruction]]:
    """The instructions of one evaluation step, for any placement: forwards, receives and sends only.

    A worker with several runs of cells takes as many micro-batches through a run as there are workers before it turns
    to the next one, so that its neighbours always have work.
    """
    _check_sizes(placement, M)
    workers = max(placement) + 1
    lists: list[list[Unit]] = [[] for _ in range(workers)]
    for first in range(0, M, workers):
        for cells in _runs(placement):
            group = range(first, min(first + workers, M))
            lists[placement[cells[0]]] += [Unit(Op.FORWARD, cells, m) for m in group]
    return [_instructions(units, placement, "never") for units in lists]


def execution_order(lists: InstructionLists) -> Iterator[tuple[int, Instruction]]:
    """Walks the lists as the workers would: sends never block, a receive waits for its send.

    Yields:
        (worker, instruction), in an order that one process could execute.

    Raises:
        ScheduleError: at the end, if some workers wait for ever; it names where each of them stands.
    """
    positions = [0] * len(lists)
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    runnable = list(range(len(lists)))
    while runnable:
        worker = runnable.pop()
        while positions[worker] < len(lists[worker]):
            instruction = lists[worker][positions[worker]]
            awaited = instruction.awaited_message
            if awaited is not None and awaited not in sent:
                waiting[awaited] = worker
                break
            yield worker, instruction
            positions[worker] += 1
            message = instruction.sent_message
            if message is not None:
                sent.add(message)
                if message in waiting:
                    runnable.append(waiting.pop(message))
    stuck = [
        f"worker {worker} waits at {instructions[position]} (instruction {position})"
        for worker, (instructions, position) in enumerate(zip(lists, positions, strict=True))
        if position < len(instructions)
    ]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")


@dataclass(frozen=True)
class Kept:
    """The most that one worker's list keeps at any moment of a step.

    Attributes:
        inputs: cell -> micro-batches whose boundary input is kept, from forward to backward.
        graphs: cell -> micro-batches whose graph is kept, from forward (or recompute) to backward.
        bytes: of both together over all the worker's cells, for the sizes given; 0 without sizes.
    """

    inputs: dict[int, int]
    graphs: dict[int, int]
    bytes: float


def most_kept(
    instructions: Sequence[Instruction],
    input_bytes: Mapping[int, float] | None = None,
    graph_bytes: Mapping[int, float] | None = None,
) -> Kept:
    """What a worker has to hold in memory, from its training list (paper, section 2.3: N + (L/K)·(N/M)).

    Args:
        instructions: the list of one worker.
        input_bytes: cell -> size of the boundary input of one micro-batch.
        graph_bytes: cell -> size of what one micro-batch's graph holds beside it.
    """
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    cells = {i.cell for i in instructions}
    input_bytes, graph_bytes = input_bytes or {}, graph_bytes or {}
    inputs, graphs = dict.fromkeys(cells, 0), dict.fromkeys(cells, 0)
    most_inputs, most_graphs = dict(inputs), dict(graphs)
    now = most = 0.0
    for i in instructions:
        if i.op not in COMPUTE:
            continue
        input_change = {Op.FORWARD: 1, Op.RECOMPUTE: 0, Op.BACKWARD: -1}[i.op]
        forgets_its_graph = i.op is Op.FORWARD and (i.cell, i.micro_batch) in recomputed
        graph_change = 0 if forgets_its_graph else -1 if i.op is Op.BACKWARD else 1
        inputs[i.cell] += input_change
        graphs[i.cell] += graph_change
        most_inputs[i.cell] = max(most_inputs[i.cell], inputs[i.cell])
        most_graphs[i.cell] = max(most_graphs[i.cell], graphs[i.cell])
        now += input_change * input_bytes.get(i.cell, 0) + graph_change * graph_bytes.get(i.cell, 0)
        most = max(most, now)
    return Kept(most_inputs, most_graphs, most)


def _instructions(units: Sequence[Unit], placement: Sequence[int], remat: str) -> list[Instruction]:
    """One worker's units with their receives, recomputes and sends."""
    made: list[Instruction] = []
    before: Unit | None = None
    for unit in units:
        if unit.op is Op.FORWARD:
            made += _forward(unit, placement)
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
    """``early`` are the cells recomputed before the gradient arrives, while the worker would idle (section 2.3)."""
    for cell in reversed(early):
        yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
    for cell in reversed(unit.cells):
        if cell + 1 < len(placement) and placement[cell + 1] != placement[cell]:
            yield Instruction(Op.RECEIVE_GRADIENT, cell, unit.micro_batch)
        if recompute and cell not in early:
            yield Instruction(Op.RECOMPUTE, cell, unit.micro_batch)
        yield Instruction(Op.BACKWARD, cell, unit.micro_batch)
        if cell > 0 and placement[cell - 1] != placement[cell]:
            yield Instruction(Op.SEND_GRADIENT, cell, unit.micro_batch)


def _runs(placement: Sequence[int]) -> list[tuple[int, ...]]:
    """The cells in runs: as many consecutive ones together as stand on one worker."""
    runs: list[tuple[int, ...]] = []
    for cell, worker in enumerate(placement):
        if cell > 0 and placement[cell - 1] == worker:
            runs[-1] += (cell,)
        else:
            runs.append((cell,))
    return runs


def _one_run_per_worker(kind: str, placement: Sequence[int]) -> list[tuple[int, ...]]:
    runs = _runs(placement)
    if [placement[cells[0]] for cells in runs] != list(range(len(runs))):
        raise ScheduleError(
            f"schedule {kind} needs the cells of a worker side by side and the workers in order, but the placement "
            f"is {list(placement)}: use one like {sorted(placement)}"
        )
    return runs


def _check_sizes(placement: Sequence[int], M: int) -> None:
    if M < 1:
        raise ScheduleError(f"pipeline.M={M}: a step needs at least one micro-batch; use pipeline.M=1 or more")
    if not placement or set(placement) != set(range(max(placement) + 1)):
        raise ScheduleError(
            f"placement {list(placement)}: give each cell a worker, counted from 0, so that every worker has a cell"
        )
