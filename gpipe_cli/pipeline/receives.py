"""Posts the receives of one worker's step before they are waited for: how far ahead, and when not yet.

A posted receive of NCCL is a kernel that waits on the device. Whatever waits for the whole device meanwhile (a kernel
that is loaded at its first use, an allocator short of memory, a layer that synchronises) waits for that message too. So
with NCCL a receive is posted only when nothing that this worker has yet to send stands before it: then a wait of the
whole device delays no other worker.
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


def sends_before(instructions: Sequence[Instruction]) -> dict[Instruction, int]:
    """Returns for each receive how many sends stand before it in its worker's list."""
    sends, before = 0, {}
    for instruction in instructions:
        if instruction.op in SENDS:
            sends += 1
        elif instruction.op in RECEIVES:
            before[instruction] = sends
    return before


class ReceivesAhead(Generic[Pending]):
    """Posts the receives of one step, of each kind in the order in which they will be waited for.

    Args:
        instructions: of the worker.
        post: posts a receive and returns it; None when its shapes are not known yet.
        after_sends: no receive is posted before the sends that stand before it in the list.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        post: Callable[[Instruction], Pending | None],
        after_sends: bool,
    ) -> None:
        self._post = post
        self._left = {op: deque(i for i in instructions if i.op is op) for op in RECEIVES}
        self._posted: dict[Instruction, Pending] = {}
        self._ahead = dict.fromkeys(RECEIVES, 0)
        self._sends_before = sends_before(instructions) if after_sends else None
        self._sent = 0

    def __bool__(self) -> bool:
        """Returns whether a posted message has not been waited for."""
        return bool(self._posted)

    def post_ahead(self, op: Op) -> None:
        """Posts as many receives of one kind as may be posted now."""
        left = self._left[op]
        while left and self._ahead[op] < RECEIVES_AHEAD:
            if self._sends_before is not None and self._sends_before[left[0]] > self._sent:
                return
            pending = self._post(left[0])
            if pending is None:
                return
            self._posted[left.popleft()] = pending
            self._ahead[op] += 1

    def has_sent(self) -> None:
        """Counts one more send that has been started, and posts what may be posted since."""
        self._sent += 1
        for op in RECEIVES:
            self.post_ahead(op)

    def take(self, instruction: Instruction) -> Pending | None:
        """Returns the next receive of its kind if it was posted; if None, the caller posts it."""
        pending = self._posted.pop(instruction, None)
        if pending is None:
            self._left[instruction.op].popleft()
        else:
            self._ahead[instruction.op] -= 1
        return pending
