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
from collections import defaultdict, deque
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
    """Returns for each worker which receives it posts before which instruction of its list.

    Runs the lists on the ideal machine of this file's beginning, from one end of computations to the next:

    1. Workers whose computation ends now are in a gap and send the messages that stand next in their lists.
    2. A message on its way is posted if its receiver is in a gap.
    3. A gap ends, and the next computation begins, when what it has sent and what that computation awaits are posted.
    """
    receivers = {i.awaited_message: (worker, i) for worker, each in enumerate(lists) for i in each}
    posts = [defaultdict[int, list[Instruction]](list) for _ in lists]
    positions = [0] * len(lists)  # of each worker's next instruction
    in_gap: dict[int, list[Message]] = {}  # worker between two computations -> messages that it has sent in this gap
    under_way: list[Message] = []  # sent and not yet posted
    posted: set[Message | None] = {None}
    running = [(0, worker) for worker in range(len(lists))]  # end of the computation, worker
    while running:
        now = running[0][0]  # 1.
        while running and running[0][0] == now:
            worker = heapq.heappop(running)[1]
            messages = (instruction.sent_message for instruction in lists[worker][positions[worker] :])
            in_gap[worker] = [message for message in takewhile(bool, messages) if message]
            positions[worker] += len(in_gap[worker])
            under_way += in_gap[worker]
        for message in under_way:  # 2.
            worker, receive = receivers[message]
            if worker in in_gap:
                posts[worker][positions[worker]].append(receive)
                posted.add(message)
        under_way = [message for message in under_way if message not in posted]
        for worker, sent in list(in_gap.items()):  # 3.
            coming = list(takewhile(lambda i: i.op not in COMPUTE, lists[worker][positions[worker] :]))
            begin = positions[worker] + len(coming)
            if begin < len(lists[worker]) and posted.issuperset([*sent, *(i.awaited_message for i in coming)]):
                del in_gap[worker]
                positions[worker] = begin + 1
                heapq.heappush(running, (now + UNITS.get(lists[worker][begin].op, 1), worker))
    return list(posts)


class Receives(Generic[Pending]):
    """Holds the receives of one step that are posted and not yet waited for.

    Args:
        posts: receives that are due before each instruction.
        post: posts a receive and returns it, or None while its shapes are not known. Such a receive is tried again
            before each instruction. The next receives of its kind wait for it, because they must be posted in order.
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
        """Returns the posted receive of an instruction; None if it was not posted, and the caller now posts it."""
        pending = self._posted.pop(instruction, None)
        if pending is None:
            self._due[instruction.op].popleft()
        return pending
