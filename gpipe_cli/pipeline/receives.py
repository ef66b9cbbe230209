"""Receives of one worker's step, posted before they are waited for: how far ahead, and when not yet.

A posted receive of NCCL is a kernel that waits on the device. Whatever waits for the whole device meanwhile (a kernel
that is loaded at its first use, an allocator short of memory, a layer that synchronises) waits for that message too;
so there it is posted only when nothing that this worker has yet to send stands before it. Computing can then as well
wait for it: that changes nothing for anybody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..schedule.instruction import Instruction, Op

# Receives posted before they are needed, in each direction: a late one costs gloo up to 2 ms, an early one memory.
RECEIVES_AHEAD = 2

SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)

Pending = TypeVar("Pending")


def sends_before(program: Sequence[Instruction]) -> dict[tuple[Op, int, int], int]:
    """For each receive, by (op, cell, micro-batch), how many sends stand before it in its worker's list."""
    sends, before = 0, {}
    for instruction in program:
        if instruction.op in SENDS:
            sends += 1
        elif instruction.op in RECEIVES:
            before[instruction.op, instruction.cell, instruction.micro_batch] = sends
    return before


class ReceivesAhead(Generic[Pending]):
    """Posts the receives of one step, of each kind in the order in which they will be waited for.

    Args:
        program: the worker's instructions.
        post: starts one, by its (op, cell, micro-batch); None when its shapes are not known yet.
        after_sends: no receive is posted before the sends that stand before it in ``program``.
    """

    def __init__(
        self, program: Sequence[Instruction], post: Callable[[Op, int, int], Pending | None], after_sends: bool
    ) -> None:
        self._post = post
        self._left = {op: deque(i for i in program if i.op is op) for op in RECEIVES}
        self._posted: dict[tuple[Op, int, int], Pending] = {}
        self._ahead = dict.fromkeys(RECEIVES, 0)
        self._sends_before = sends_before(program) if after_sends else None
        self._sent = 0

    def __bool__(self) -> bool:
        """Whether a message is still awaited."""
        return bool(self._posted)

    def post_ahead(self, op: Op) -> None:
        """Posts as many of one kind as may be."""
        left = self._left[op]
        while left and self._ahead[op] < RECEIVES_AHEAD:
            place = op, left[0].cell, left[0].micro_batch
            if self._sends_before is not None and self._sends_before[place] > self._sent:
                return
            pending = self._post(*place)
            if pending is None:
                return
            self._posted[place] = pending
            self._ahead[op] += 1
            left.popleft()

    def has_sent(self) -> None:
        """One more send has been started; what may be posted since is."""
        self._sent += 1
        for op in RECEIVES:
            self.post_ahead(op)

    def take(self, op: Op, cell: int, micro_batch: int) -> Pending | None:
        """The next of its kind, if it was posted; else it is the caller's to post."""
        pending = self._posted.pop((op, cell, micro_batch), None)
        if pending is None:
            self._left[op].popleft()
        else:
            self._ahead[op] -= 1
        return pending
