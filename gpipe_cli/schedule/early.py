"""Posts receives on GPUs one computation earlier, so that messages travel while workers compute.

NCCL's stream of messages waits, at each call, for what the device has been given before. So a receive overlaps with a
computation only if it is posted before that computation, and `post_when_sent` posts most of them directly behind it.

Under the strictest rules (`posting.py`) the computation that follows a post waits for the message, and the one that
follows a send waits for the post. The lists are run once with these waits. Where a computation could begin, the
receives behind it are posted in front of it instead, unless their messages wait, through any others, for it itself.
Where not all can move, it matters which come first: both orders are tried, and the shorter simulated step is taken.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial

from .instruction import COMPUTE, Instruction, InstructionLists, Message
from .posting import UNITS, Posts, post_when_sent
from .simulate import simulate

_ORDERS = (("activation", "gradient"), ("gradient", "activation"))
_TRANSFER = 0.25  # time of a message as a share of a forward's, in the simulation that chooses

Computation = tuple[int, int]  # worker; number among the worker's computations
Node = Message | Computation


def post_early(lists: InstructionLists) -> list[Posts]:
    """Returns for each worker the posts of `post_when_sent`, one computation earlier wherever no worker can stall."""
    found = []
    for order in _ORDERS:
        machine = _StrictMachine(lists)
        for direction in order:
            machine.run(direction)
        found.append([machine.posts(worker) for worker in range(len(lists))])
    return min(found, key=partial(_seconds, lists))


def _seconds(lists: InstructionLists, posts: Sequence[Posts]) -> float:
    """Returns the simulated length of a step, in forwards."""
    return simulate(lists, (), lambda i: UNITS.get(i.op, 1), _TRANSFER, posts=posts).span


class _StrictMachine:
    """Runs lists on the strictest device, and moves receives.

    Gap n of a worker lies in front of its computation n. A message waits for the computations in front of the gaps of
    its send and its post, and for earlier messages of its communicator in them; the computations behind wait for it.
    """

    def __init__(self, lists: InstructionLists) -> None:
        self._lists = lists
        self._computations = [[at for at, i in enumerate(each) if i.op in COMPUTE] for each in lists]
        self._calls: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by worker and gap: sends, then receives
        self._gaps: dict[Message, dict[int, int]] = defaultdict(dict)  # gap at both ends, by worker; the sender first
        self._receives = {message: i for each in lists for i in each if (message := i.awaited_message) is not None}
        self._done: set[Node] = set()  # in the present run
        sends = [(worker, at, i.sent_message) for worker, each in enumerate(lists) for at, i in enumerate(each)]
        posted = ((worker, at, own) for worker, posts in enumerate(post_when_sent(lists)) for at, own in posts.items())
        receives = [(worker, at, i.awaited_message) for worker, at, own in posted for i in own]
        for worker, position, message in (*sends, *receives):
            if message is not None:
                gap = bisect_left(self._computations[worker], position)
                self._calls[worker, gap].append(message)
                self._gaps[message][worker] = gap

    def run(self, direction: str) -> None:
        """Runs the lists once, and moves each receive of this direction one gap ahead wherever that is safe."""
        self._done.clear()
        pending = deque[Node]((worker, 0) for worker in range(len(self._lists)))
        while pending:
            node = pending.popleft()
            if node in self._done or any(one not in self._done for one in self._neighbours(node, -1)):
                continue
            if not isinstance(node, Message) and (moved := self._advance(node, direction)):
                pending.extend(moved)
            else:
                self._done.add(node)
                pending.extend(self._neighbours(node, 1))

    def posts(self, worker: int) -> Posts:
        """Returns the worker's receives by the position of its list before which they are posted.

        They are posted behind the sends of their gap.
        """
        posts: dict[int, list[Instruction]] = {}
        for gap, computation in enumerate([-1, *self._computations[worker]]):
            calls = self._calls[worker, gap]
            if own := [self._receives[message] for message in calls if self._receiver(message) == worker]:
                posts[computation + 1 + len(calls) - len(own)] = own
        return posts

    def _advance(self, computation: Computation, direction: str) -> list[Message]:
        """Moves receives of a direction from the gap behind a computation to that in front; returns their messages."""
        worker, gap = computation
        moved = []
        for message in list(self._calls.get((worker, gap + 1), ())):
            may_move = message.direction == direction and self._receiver(message) == worker
            if may_move and not self._waits_for(message, computation):
                self._calls[worker, gap + 1].remove(message)
                self._calls[worker, gap].append(message)
                self._gaps[message][worker] = gap
                moved.append(message)
        return moved

    def _waits_for(self, message: Message, computation: Computation) -> bool:
        """Returns whether the message, posted in front of the computation, would wait for it, also through others."""
        sender, gap = next(iter(self._gaps[message].items()))
        before = self._calls[sender, gap]
        pending: list[Node] = [(sender, gap - 1), *before[: before.index(message)]]
        found = set(pending)
        while pending:
            node = pending.pop()
            if node == computation:
                return True
            new = {one for one in self._neighbours(node, -1) if one not in self._done} - found
            found |= new
            pending.extend(new)
        return False

    def _neighbours(self, node: Node, step: int) -> Iterator[Node]:
        """Yields what a message or a computation waits for (step -1), or what waits for it (step 1)."""
        if isinstance(node, Message):
            for worker, gap in self._gaps[node].items():
                if 0 <= (number := gap if step == 1 else gap - 1) < len(self._computations[worker]):
                    yield worker, number
                calls = self._calls[worker, gap]
                place = calls.index(node)
                others = calls[place + 1 :] if step == 1 else calls[:place]
                yield from (one for one in others if self._channel(one) == self._channel(node))
        else:
            worker, number = node
            if 0 <= number + step < len(self._computations[worker]):
                yield worker, number + step
            yield from self._calls.get((worker, number + (step == 1)), ())

    def _channel(self, message: Message) -> tuple[str, bool]:
        """Returns which communicator carries the message: of its direction, and to later or to earlier workers."""
        sender, receiver = self._gaps[message]
        return message.direction, sender < receiver

    def _receiver(self, message: Message) -> int:
        """Returns the worker that receives the message."""
        _, receiver = self._gaps[message]
        return receiver
