"""Checks instruction lists against the rules of a synchronous pipeline (paper, section 2.2) before anything runs them.

The rules do not depend on the kind of schedule, so a new kind is checked by the same function.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import zip_longest

from .instruction import BACK, Instruction, InstructionLists, Message, Op, ScheduleError, execution_order
from .schedule import REMAT

_Key = tuple[Op, int, int]  # an instruction as a tuple, which is faster to hash
_End = list[tuple[Message, Instruction]]  # the sends, or the receives, of one direction between two workers
_TOO_LATE = {Op.RECOMPUTE: "recomputes after its backward"} | dict.fromkeys(BACK, "has come back before")


def validate(lists: InstructionLists, placement: Sequence[int], M: int, remat: str | None = None) -> None:
    """Checks the lists of one step.

    * Every cell runs every micro-batch forward once and backward once, either whole or in its two halves, the input's
      before the weights'. What an instruction needs stands before it.
    * Every message is sent once and received once, on the right workers. Between two workers the messages of one
      direction are received in the order in which they are sent (queues such as NCCL's need that).
    * The workers never wait for each other in a circle, where a receive waits for its send, and a send for the receive
      of the message that was sent `send_window` messages before it.

    Args:
        lists: one list per worker.
        placement: ``placement[cell]`` is the cell's worker.
        M: micro-batches per mini-batch.
        remat: None for a forward-only step. ``always`` also demands a recompute before every backward, ``never``
            forbids them; ``except_last`` leaves it to the list.

    Raises:
        ScheduleError: the first rule broken, with the worker, the instruction and its position in the list.
    """
    if remat is not None and remat not in REMAT:
        raise ScheduleError(f"pipeline.remat={remat}: use {', '.join(REMAT)}")
    if len(lists) != max(placement) + 1:
        raise ScheduleError(f"{len(lists)} lists of instructions for the {max(placement) + 1} workers of the placement")
    for worker, instructions in enumerate(lists):
        done = _check_worker(worker, instructions, placement, M, remat)
        _check_complete(worker, done, placement, M, remat)
    _check_messages(lists, placement)
    deque(execution_order(lists), maxlen=0)


def _check_worker(
    worker: int, instructions: Sequence[Instruction], placement: Sequence[int], M: int, remat: str | None
) -> set[_Key]:
    """Checks that each instruction is allowed and stands behind what it needs; returns all that the worker does."""
    done: set[_Key] = set()
    requirements: dict[tuple[Op, int], tuple[tuple[Op, int], ...]] = {}
    for position, instruction in enumerate(instructions):
        op, cell, m = instruction.op, instruction.cell, instruction.micro_batch
        needs = requirements.get((op, cell))
        if needs is None:
            problem = _misplaced(worker, op, cell, placement, remat)
            if problem:
                raise _error(worker, position, instruction, problem)
            needs = requirements[op, cell] = _needs(op, cell, placement, remat)
        if not 0 <= m < M:
            raise _error(worker, position, instruction, f"micro-batches are counted from 0 to M-1={M - 1}")
        if (op, cell, m) in done:
            raise _error(worker, position, instruction, "stands in the list twice")
        if op in (Op.RECOMPUTE, *BACK) and any((back, cell, m) in done for back in BACK):
            raise _error(worker, position, instruction, _TOO_LATE[op])
        for needed_op, needed_cell in needs:
            if (needed_op, needed_cell, m) not in done and not (
                needed_op is Op.BACKWARD and (Op.INPUT_GRADIENT, needed_cell, m) in done
            ):
                needed = Instruction(needed_op, needed_cell, m)
                later = needed in instructions
                where = f"comes only at {instructions.index(needed)}" if later else "is not in the list"
                raise _error(worker, position, instruction, f"needs {needed} before it, which {where}")
        done.add((op, cell, m))
    return done


def _error(worker: int, position: int, instruction: Instruction, problem: str) -> ScheduleError:
    return ScheduleError(f"worker {worker}, instruction {position}, {instruction}: {problem}")


def _misplaced(worker: int, op: Op, cell: int, placement: Sequence[int], remat: str | None) -> str | None:
    """Returns why the worker can never run this instruction for this cell; None if it can."""
    if not 0 <= cell < len(placement):
        return f"cells are counted from 0 to K-1={len(placement) - 1}"
    if placement[cell] != worker:
        return f"cell {cell} is on worker {placement[cell]}"
    if remat is None and op not in (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION):
        return "a forward-only step has no recompute, backward or gradient"
    if remat == "never" and op is Op.RECOMPUTE:
        return "pipeline.remat=never recomputes nothing"
    neighbour = _neighbour(op, cell)
    if neighbour is None:
        return None
    if not 0 <= neighbour < len(placement):
        return f"there is no cell {neighbour} on the other side"
    if placement[neighbour] == worker:
        return f"cell {neighbour} is on the same worker, where a boundary is no message"
    return None


def _neighbour(op: Op, cell: int) -> int | None:
    """Returns the cell at the other end of a message; None for instructions that send and receive nothing."""
    if op in (Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT):
        return cell + 1
    if op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT):
        return cell - 1
    return None


def _needs(op: Op, cell: int, placement: Sequence[int], remat: str | None) -> tuple[tuple[Op, int], ...]:
    """Returns what must stand before it, for the same micro-batch; in place of BACKWARD its first half is enough."""
    if op is Op.FORWARD and cell > 0:
        local = placement[cell - 1] == placement[cell]
        return ((Op.FORWARD, cell - 1) if local else (Op.RECEIVE_ACTIVATION, cell),)
    if op in (Op.RECOMPUTE, Op.SEND_ACTIVATION):
        return ((Op.FORWARD, cell),)
    if op is Op.WEIGHT_GRADIENT:
        return ((Op.INPUT_GRADIENT, cell),)
    if op is Op.SEND_GRADIENT:
        return ((Op.BACKWARD, cell),)
    if op in BACK:
        needs = [(Op.FORWARD, cell)]
        if remat == "always":
            needs.append((Op.RECOMPUTE, cell))
        if cell + 1 < len(placement):
            local = placement[cell + 1] == placement[cell]
            needs.append((Op.BACKWARD, cell + 1) if local else (Op.RECEIVE_GRADIENT, cell))
        return tuple(needs)
    return ()


def _check_complete(worker: int, done: set[_Key], placement: Sequence[int], M: int, remat: str | None) -> None:
    for cell in (cell for cell, owner in enumerate(placement) if owner == worker):
        for m in range(M):
            halves = (Op.INPUT_GRADIENT, cell, m) in done
            back = Op.WEIGHT_GRADIENT if halves else Op.BACKWARD
            for op in (Op.FORWARD,) if remat is None else (Op.FORWARD, back):
                if (op, cell, m) not in done:
                    raise ScheduleError(f"worker {worker}: {Instruction(op, cell, m)} is missing")


def _check_messages(lists: InstructionLists, placement: Sequence[int]) -> None:
    """Checks that every awaited message is sent, and in the order in which it is awaited.

    That every sent message is awaited follows from what forwards and backwards need.
    """
    ends: dict[tuple[int, int, str], tuple[_End, _End]] = defaultdict(lambda: ([], []))
    for instruction in (i for instructions in lists for i in instructions):
        for end, message in enumerate((instruction.sent_message, instruction.awaited_message)):
            if message is not None:
                channel = placement[message.sender], placement[message.receiver], message.direction
                ends[channel][end].append((message, instruction))
    for (sender, receiver, direction), (sent, received) in sorted(ends.items()):
        for number, (one, other) in enumerate(zip_longest(sent, received, fillvalue=(None, "nothing"))):
            if one[0] != other[0]:
                raise ScheduleError(
                    f"{direction} messages from worker {sender} to worker {receiver}: number {number} is sent as "
                    f"{one[1]} but received as {other[1]}; receive in the order of sending"
                )
