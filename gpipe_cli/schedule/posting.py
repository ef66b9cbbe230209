"""Decides when each receive of a step is posted: before which instruction of its worker's list.

`post_ahead` is for transports whose posted receives only wait in memory (gloo, shared memory).

`post_when_sent` is for devices that a posted receive occupies (NCCL: a kernel that waits on the device). Between two
computations such a device is in a gap, in which its transfers run. Under the strictest rules a send ends only when its
receive is posted, a receive only when its message is sent, and no computation begins before both: whatever waits for
the whole device (a kernel loaded at its first use, an allocator short of memory, a layer that synchronises) waits for
the transfers too. Then two workers wait for each other for ever if one posts too early, or too late for the other.

So the lists are run once on an ideal machine with these rules, where a receive is posted in the first gap of its worker
that finds the message sent. This never stalls: a worker that waits for its send waits for a computation to end. In the
run each receive is posted in the gap found here. The order of gaps is the same for any durations, and a gap waits only
for earlier ones, so the run cannot stall either. `early.py` moves these receives, so that they overlap.

`Receives` posts what is due while a step runs.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from .instruction import COMPUTE, Instruction, InstructionLists, Message, Op

# Receives, by the position in the worker's list before which they are posted:
Posts = Mapping[int, Sequence[Instruction]]
Pending = TypeVar("Pending")

RECEIVES_AHEAD = 2  # of each kind, at most: a late one costs gloo up to 2 ms, an early one memory

UNITS = {Op.BACKWARD: 2}  # of time; any other computation takes 1


def post_ahead(instructions: Sequence[Instruction]) -> Posts:
    """Returns when a worker posts its receives: of each kind `RECEIVES_AHEAD` before they are waited for.

    The first gradients follow the first send: before it, no shape of a gradient is known in the first step.
    """
    sends = [position for position, i in enumerate(instructions) if i.sent_message is not None]
    earliest = {Op.RECEIVE_ACTIVATION: 0, Op.RECEIVE_GRADIENT: sends[0] + 1 if sends else 0}
    posts: dict[int, list[Instruction]] = {}
    for op, first in earliest.items():
        waits = [position for position, i in enumerate(instructions) if i.op is op]
        for position, before in zip(waits, [first] * RECEIVES_AHEAD + waits, strict=False):
            posts.setdefault(min(before, position), []).append(instructions[position])
    return posts


def post_when_sent(lists: InstructionLists) -> list[Posts]:
    """Returns for each worker which receives it posts before which instruction of its list."""
    receivers = {
        message: (worker, instruction)
        for worker, instructions in enumerate(lists)
        for instruction in instructions
        if (message := instruction.awaited_message) is not None
    }
    workers = [_Worker(instructions) for instructions in lists]
    running: list[tuple[int, int]] = [(0, number) for number in range(len(lists))]  # end of the computation, worker
    under_way: dict[Message, int] = {}  # sent and not yet posted, with the sender
    while running:
        now = running[0][0]
        while running and running[0][0] == now:
            number = heapq.heappop(running)[1]
            under_way |= dict.fromkeys(workers[number].reach_gap(), number)
        for message, sender in list(under_way.items()):
            receiver, instruction = receivers[message]
            if workers[receiver].in_gap:
                workers[receiver].posts.setdefault(workers[receiver].position, []).append(instruction)
                workers[receiver].received.add(message)
                workers[sender].unposted -= 1
                del under_way[message]
        for number, worker in enumerate(workers):
            if worker.in_gap and (operation := worker.leave_gap()) is not None:
                heapq.heappush(running, (now + UNITS.get(operation, 1), number))
    return [worker.posts for worker in workers]


class _Worker:
    """Follows one worker's list on the ideal machine.

    Attributes:
        position: place of the next instruction.
        in_gap: no computation runs.
        posts: found so far.
        received: messages whose receive is posted.
        unposted: own sends whose receive is not posted yet.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        self.position, self.in_gap, self.unposted = 0, False, 0
        self.posts: dict[int, list[Instruction]] = {}
        self.received: set[Message] = set()

    def reach_gap(self) -> list[Message]:
        """Ends the computation; returns the messages that are sent behind it."""
        messages = (instruction.sent_message for instruction in self.instructions[self.position :])
        sent = [message for message in takewhile(bool, messages) if message]
        self.in_gap, self.position, self.unposted = True, self.position + len(sent), len(sent)
        return sent

    def leave_gap(self) -> Op | None:
        """Begins the next computation and returns its kind; None while a transfer that it waits for is not posted."""
        position = self.position
        while position < len(self.instructions) and self.instructions[position].op not in COMPUTE:
            awaited = self.instructions[position].awaited_message
            if awaited is not None and awaited not in self.received:
                return None
            position += 1
        if self.unposted or position == len(self.instructions):
            self.position = position if not self.unposted else self.position
            return None
        self.position, self.in_gap = position + 1, False
        return self.instructions[position].op


class Receives(Generic[Pending]):
    """Holds the receives of one step that are posted and not yet waited for.

    Args:
        posts: receives that are due before each instruction.
        post: posts a receive and returns it; None while its shapes are not known: it is tried again before each
            instruction, and the next receives of its kind wait for it, because they must be posted in order.
    """

    def __init__(self, posts: Posts, post: Callable[[Instruction], Pending | None]) -> None:
        self._posts, self._post = posts, post
        self._due: dict[Op, deque[Instruction]] = {Op.RECEIVE_ACTIVATION: deque(), Op.RECEIVE_GRADIENT: deque()}
        self._posted: dict[Instruction, Pending] = {}

    def post_due(self, position: int) -> None:
        """Posts the receives that are due before the instruction at this position of the list."""
        for instruction in self._posts.get(position, ()):
            self._due[instruction.op].append(instruction)
        for due in self._due.values():
            while due and (pending := self._post(due[0])) is not None:
                self._posted[due.popleft()] = pending

    def take(self, instruction: Instruction) -> Pending | None:
        """Returns the next receive of its kind if it was posted; if None, the caller posts it."""
        pending = self._posted.pop(instruction, None)
        if pending is None:
            self._due[instruction.op].popleft()
        return pending
