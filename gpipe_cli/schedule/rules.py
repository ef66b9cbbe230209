"""Checks instruction lists against the rules of a synchronous pipeline (paper, section 2.2)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from .instruction import (
    BACK,
    COMPUTE,
    MOVES,
    Instruction,
    InstructionLists,
    Message,
    Op,
    ScheduleError,
    execution_order,
)


def check_lists(lists: InstructionLists, placement: Sequence[int], M: int, trains: bool = True) -> None:
    """Checks the lists of one step.

    * Every cell runs every micro-batch forward once and, if the step ``trains``, backward once, whole or in its two
      halves, on its own worker. What an instruction needs has run before it.
    * A send stands behind a computation, with at most other sends between.
    * Between two workers the messages of one direction are received in the order in which they are sent.
    * Where a list brings cells' state and takes it away, a cell runs in between only.
    * The workers never wait for each other in a circle, with at most `send_window` messages on their way.

    Raises:
        ScheduleError: a rule is broken; names the instruction.
    """
    for instructions in lists:
        for before, i in zip((None, *instructions), instructions, strict=False):
            if i.sent_message is not None and (before is None or before.awaited_message is not None):
                raise ScheduleError(f"{i}: a send stands directly behind a computation or another send")
        _check_moves(instructions)
    done: set[Instruction] = set()
    ways: dict[tuple[int, int, str], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for worker, i in execution_order(lists):
        _check_turn(i, worker, placement, done)
        done.add(i)
        for end, message in enumerate((i.sent_message, i.awaited_message)):
            if message is not None:
                sender, receiver = placement[message.sender], placement[message.receiver]
                if sender == receiver:
                    raise ScheduleError(f"{i}: both cells lie on worker {sender}, so nothing is sent")
                ways[sender, receiver, message.direction][end].append(message)
    for (sender, receiver, direction), (sent, received) in ways.items():
        if sent != received:
            said = f"worker {receiver} receives {direction}s in another order than worker {sender} sends them"
            raise ScheduleError(f"{said}, or not all")
    _check_complete(done, len(placement), M, trains)


def _check_moves(instructions: Sequence[Instruction]) -> None:
    """Checks that a cell computes only while its state is in memory, if the list moves state at all."""
    moves, there = any(i.op is Op.BRING for i in instructions), set[int]()
    for i in instructions:
        if i.op is Op.BRING:
            there.add(i.cell)
        elif i.op is Op.TAKE_AWAY:
            there.discard(i.cell)
        elif moves and i.op in COMPUTE and i.cell not in there:
            raise ScheduleError(f"{i}: its cell's weights have not been brought")


def _check_turn(i: Instruction, worker: int, placement: Sequence[int], done: set[Instruction]) -> None:
    """Checks that an instruction stands on its cell's worker, behind all that it needs."""
    if i.cell >= len(placement) or placement[i.cell] != worker or (i in done and i.op not in MOVES):
        raise ScheduleError(f"{i}: on worker {worker}, which has no such cell, or for the second time")
    missing = [needed for needed in _needs(i, placement) if not any(one in done for one in needed)]
    if missing:
        raise ScheduleError(f"{i}: needs {' or '.join(map(str, missing[0]))} before it")
    if i.op in (*BACK, Op.RECOMPUTE) and any(one in done for one in _back(i.cell, i.micro_batch)):
        raise ScheduleError(f"{i}: stands behind the backward")


def _check_complete(done: set[Instruction], K: int, M: int, trains: bool) -> None:
    """Checks that each cell has run each micro-batch forward and, in training, backward; and no others."""
    if any(i.cell >= K or i.micro_batch >= M for i in done):
        raise ScheduleError("a cell or a micro-batch that does not exist")
    for cell, m in product(range(K), range(M)):
        forward, back, first, second = (
            Instruction(op, cell, m) in done for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
        )
        if not forward:
            raise ScheduleError(f"no forward {cell}.{m}")
        if first != second:
            raise ScheduleError(f"half a backward {cell}.{m}")
        if (back or first) != trains:
            raise ScheduleError(f"{'no' if trains else 'a'} backward {cell}.{m}")


def _back(cell: int, m: int) -> list[Instruction]:
    """Returns the two instructions that can make the gradient of the cell's input: whole backward and first half."""
    return [Instruction(op, cell, m) for op in BACK]


def _needs(i: Instruction, placement: Sequence[int]) -> Iterator[list[Instruction]]:
    """Yields lists of instructions; of each list one must have run before this instruction."""
    cell, m = i.cell, i.micro_batch
    if i.op is Op.FORWARD and cell > 0:
        local = placement[cell - 1] == placement[cell]
        yield [Instruction(Op.FORWARD, cell - 1, m) if local else Instruction(Op.RECEIVE_ACTIVATION, cell, m)]
    if i.op in (Op.RECOMPUTE, Op.SEND_ACTIVATION, *BACK):
        yield [Instruction(Op.FORWARD, cell, m)]
    if i.op in BACK and cell + 1 < len(placement):
        local = placement[cell + 1] == placement[cell]
        yield _back(cell + 1, m) if local else [Instruction(Op.RECEIVE_GRADIENT, cell, m)]
    if i.op is Op.WEIGHT_GRADIENT:
        yield [Instruction(Op.INPUT_GRADIENT, cell, m)]
    if i.op is Op.SEND_GRADIENT:
        yield _back(cell, m)
