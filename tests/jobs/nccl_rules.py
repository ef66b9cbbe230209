"""Models what NCCL and CUDA allow for the calls of several ranks, to find orders of calls that can wait for ever.

A rank's host makes its calls in order. A call puts an operation into a queue of the rank's device and returns; the
device has one queue for computations and one for each communicator. The rules:

* A communicator of two ranks runs its messages one after the other, in the same order on both; NCCL has no tags.
* A send ends when it is in the communicator's buffer, or, if it is larger, when its receive has begun.
* A transfer begins only when all computations that were queued before it have ended.
* A transfer that has begun and cannot end may occupy the device: no computation begins meanwhile.
* A hidden synchronisation (a kernel is loaded at its first use, the allocator is short of memory) holds the host
  until the device's queues are empty.
* The first transfer of a communicator makes the connection and holds the hosts until all its ranks do so.
* A collective begins when all ranks of the communicator have called it, and must be the same one on all of them.

What happens next is drawn from all that can happen, so a stall is found again by its seed. Run as a script with two
numbers, draws runs of random schedules under random rules for the seeds from the first number to the second; a third
number ends it after so many seconds.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpipe_cli.schedule.instruction import COMPUTE, Instruction, InstructionLists, Message
from gpipe_cli.schedule.orders import KINDS, ROUND_ROBIN
from gpipe_cli.schedule.posting import Posts, post_when_sent
from gpipe_cli.schedule.schedule import REMAT, forward_only, schedule


class Call(NamedTuple):
    """Describes one call of a rank's host.

    Attributes:
        kind: ``compute``; ``send`` or ``receive``, which only begin; ``await``: later computations wait for the
            receive of this name; ``collective``; ``tell`` and ``hear``: a message from host to host.
        name: of the computation, message or collective, the same at both ends.
        ranks: the communicator's: both ends of a message, all of a collective.
        group: the process group, which has a communicator of its own for each set of ranks.
        bytes: of the message.
    """

    kind: str
    name: Hashable
    ranks: tuple[int, ...] = ()
    group: str = ""
    bytes: int = 1


@dataclass(frozen=True)
class Rules:
    """Describes the devices and the network.

    Attributes:
        buffer: bytes of a communicator's buffer in each direction; 0: every send waits for its receive.
        occupies: whether a transfer that waits keeps computations from beginning.
        hidden_syncs: probability that a computation needs a hidden synchronisation first.
        connected: whether the connections exist already.
    """

    buffer: int = 0
    occupies: bool = True
    hidden_syncs: float = 0.5
    connected: bool = True


class Stalled(Exception):
    """Raised when ranks wait for each other."""


class WrongUse(Exception):
    """Raised when calls of two ranks do not fit together."""


class Transfer(NamedTuple):
    """Describes a queued transfer: it begins when `after` entries of the queue of computations have ended."""

    call: Call
    after: int


@dataclass(eq=False)
class Rank:
    """Holds one rank: its host's place in the program, and its device's queues."""

    number: int
    program: Iterator[Call]
    call: Call | None = None  # the host's next
    synchronising: bool | None = None  # None: not drawn yet for this call
    connecting: Hashable = None
    queued: int = 0
    done: int = 0
    computations: deque[Call] = field(default_factory=deque)  # computations and awaits
    transfers: dict[Hashable, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    begun: dict[Hashable, Call] = field(default_factory=dict)  # by communicator
    received: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.call = next(self.program, None)

    @property
    def idle(self) -> bool:
        return not self.computations and not any(self.transfers.values())

    @property
    def finished(self) -> bool:
        return self.call is None and self.idle

    def advance(self) -> None:
        """Turns to the host's next call."""
        self.call, self.synchronising, self.connecting = next(self.program, None), None, None

    def __str__(self) -> str:
        waits = [
            f"host at {_shown(call)}" + " (synchronising)" * bool(self.synchronising) for call in [self.call] if call
        ]
        waits += [f"device at {_shown(call)}" for call in list(self.computations)[:1]]
        waits += [
            f"{'waiting' if communicator in self.begun else 'queued'}: {_shown(queue[0].call)}"
            for communicator, queue in self.transfers.items()
            if queue
        ]
        return f"rank {self.number}: {'; '.join(waits) or 'has ended'}"


def _shown(call: Call | None) -> str:
    if call is None:
        return "nothing"
    return f"{call.kind} {call.name}" + (f" on {call.group}{call.ranks}" if call.ranks else "")


class Machine:
    """Runs the programs of all ranks under the rules, in an order drawn by the seed.

    Raises (from `run`):
        Stalled: with every rank's state.
        WrongUse: with both ends.
    """

    def __init__(self, programs: Sequence[Iterable[Call]], rules: Rules, seed: int = 0) -> None:
        self.rules, self._draw = rules, random.Random(seed)
        self.ranks = [Rank(number, iter(program)) for number, program in enumerate(programs)]
        self._buffers: dict[Hashable, deque[Call]] = defaultdict(deque)  # by communicator and sender
        self._connected: set[Hashable] = set()
        self._told: set[Hashable] = set()
        self._active = list(self.ranks)

    def run(self) -> None:
        """Runs until all ranks have ended."""
        while self._active:
            place = self._draw.randrange(len(self._active))
            rank = self._active[place]
            if not self._step(rank):
                self._active[place] = self._active[-1]
                self._active.pop()
        if not all(rank.finished for rank in self.ranks):
            raise Stalled("\n".join(map(str, self.ranks)))

    def _wake(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.ranks[number] not in self._active:
                self._active.append(self.ranks[number])

    def _step(self, rank: Rank) -> bool:
        """Does one of the things that the rank can do; returns whether there was one."""
        ways = [self._host, self._compute, self._begin]
        self._draw.shuffle(ways)
        return any(way(rank) for way in ways)

    def _host(self, rank: Rank) -> bool:
        call = rank.call
        if call is None:
            return False
        if call.kind == "tell":
            self._told.add(call.name)
            self._wake(call.ranks)
        elif call.kind == "hear":
            if call.name not in self._told:
                return False
        elif call.kind in ("compute", "await"):
            if rank.synchronising is None:
                rank.synchronising = call.kind == "compute" and self._draw.random() < self.rules.hidden_syncs
            if rank.synchronising and not rank.idle:
                return False
            rank.computations.append(call)
            rank.queued += 1
        else:
            if not self._connects(rank, call):
                return False
            rank.transfers[call.group, call.ranks].append(Transfer(call, rank.queued))
        rank.advance()
        return True

    def _connects(self, rank: Rank, call: Call) -> bool:
        communicator = call.group, call.ranks
        if self.rules.connected or communicator in self._connected:
            return True
        rank.connecting = communicator
        if any(self.ranks[number].connecting != communicator for number in call.ranks):
            return False
        self._connected.add(communicator)
        self._wake(call.ranks)
        return True

    def _compute(self, rank: Rank) -> bool:
        if not rank.computations:
            return False
        call = rank.computations[0]
        if call.kind == "await":
            if call.name not in rank.received:
                return False
        elif self.rules.occupies and rank.begun:
            return False
        rank.computations.popleft()
        rank.done += 1
        return True

    def _begin(self, rank: Rank) -> bool:
        """Begins a transfer at the head of a communicator's queue."""
        ready = [
            communicator
            for communicator, queue in rank.transfers.items()
            if queue and communicator not in rank.begun and queue[0].after <= rank.done
        ]
        if not ready:
            return False
        communicator = self._draw.choice(ready)
        call = rank.transfers[communicator][0].call
        rank.begun[communicator] = call
        if call.kind == "collective":
            self._meet(communicator, call)
        elif call.kind == "send":
            self._match(communicator, call, rank, self.ranks[sum(call.ranks) - rank.number])
        else:
            self._match(communicator, None, self.ranks[sum(call.ranks) - rank.number], rank)
        return True

    def _meet(self, communicator: Hashable, call: Call) -> None:
        begun = [self.ranks[number].begun.get(communicator) for number in call.ranks]
        for number, other in zip(call.ranks, begun, strict=True):
            if other is not None and other != call:
                raise WrongUse(f"rank {number} calls {_shown(other)} where another calls {_shown(call)}")
        if all(begun):
            for number in call.ranks:
                self._end(communicator, self.ranks[number])

    def _match(self, communicator: Hashable, begins: Call | None, sender: Rank, receiver: Rank) -> None:
        """Ends what can end of the messages from sender to receiver; ``begins``: a send that has just begun."""
        buffer = self._buffers[communicator, sender.number]
        sent, awaited = sender.begun.get(communicator), receiver.begun.get(communicator)
        sent = sent if sent and sent.kind == "send" else None
        awaited = awaited if awaited and awaited.kind == "receive" else None
        if begins and sum(kept.bytes for kept in buffer) + begins.bytes <= self.rules.buffer:
            buffer.append(begins)
            self._end(communicator, sender)
            sent = None
        if awaited is None:
            return
        first = buffer[0] if buffer else sent
        if first is None:
            return
        if first.name != awaited.name:
            raise WrongUse(
                f"rank {sender.number} sends {first.name} where rank {receiver.number} receives {awaited.name} "
                f"(communicator {communicator})"
            )
        if buffer:
            buffer.popleft()
            self._end(communicator, receiver)
            if sent and sum(kept.bytes for kept in buffer) + sent.bytes <= self.rules.buffer:
                buffer.append(sent)
                self._end(communicator, sender)
        else:
            self._end(communicator, sender)
            self._end(communicator, receiver)

    def _end(self, communicator: Hashable, rank: Rank) -> None:
        call = rank.begun.pop(communicator)
        rank.transfers[communicator].popleft()
        if call.kind == "receive":
            rank.received.add(call.name)
        self._wake([rank.number])


def engine_calls(instructions: Sequence[Instruction], placement: Sequence[int], posts: Posts) -> list[Call]:
    """Returns the calls of a worker that runs the list; workers are ranks, and each way has a group of its own."""
    calls: list[Call] = []
    for position, instruction in enumerate(instructions):
        for receive in posts.get(position, ()):
            assert receive.awaited_message is not None
            calls.append(message_call("receive", receive.awaited_message, placement))
        if instruction.op in COMPUTE:
            calls.append(Call("compute", instruction))
        elif instruction.sent_message is not None:
            calls.append(message_call("send", instruction.sent_message, placement))
        else:
            calls.append(Call("await", instruction.awaited_message))
    return calls


def message_call(kind: str, message: Message, placement: Sequence[int]) -> Call:
    """Returns the call that begins to send or receive a message, in the group that `connect_workers` gives it."""
    sender, receiver = placement[message.sender], placement[message.receiver]
    group = f"{message.direction}s to {'later' if sender < receiver else 'earlier'} ranks"
    return Call(kind, message, (min(sender, receiver), max(sender, receiver)), group)


def programs(lists: InstructionLists, placement: tuple[int, ...]) -> list[list[Call]]:
    posts = post_when_sent(lists)
    return [engine_calls(instructions, placement, due) for instructions, due in zip(lists, posts, strict=True)]


def drawn_run(seed: int) -> tuple[list[list[Call]], Rules]:
    """Draws a training step, an evaluation and another training step of replicas, and the rules of their devices."""
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    workers = draw.choice((2, 3, 4, 5, 8, 16))
    M = draw.choice((1, 2, 3, 5, 8, 16) if workers > 5 else (1, 2, 3, 4, 7, 8, 16, 33))
    rounds = draw.choice((1, 2, 3)) if kind in ROUND_ROBIN and workers < 8 else 1
    replicas = draw.choice((1, 1, 2, 3)) if workers < 5 else 1
    placement = tuple(range(workers)) * rounds
    training = programs(schedule(kind, placement, M, draw.choice(REMAT)), placement)
    forward = programs(forward_only(placement, draw.choice((1, 2, M))), placement)
    ranks = [
        [
            *_exchange("plan", rank, workers * replicas),
            *_as_rank(training[rank % workers], "step 1", rank - rank % workers),
            *_reductions("step 1", rank, workers, replicas, rounds),
            *_exchange("report", rank, workers * replicas),
            *_as_rank(forward[rank % workers], "evaluation", rank - rank % workers),
            *_exchange("scores", rank, workers * replicas),
            *_as_rank(training[rank % workers], "step 2", rank - rank % workers),
            *_reductions("step 2", rank, workers, replicas, rounds),
        ]
        for rank in range(workers * replicas)
    ]
    return ranks, Rules(
        draw.choice((0, 0, 1, 3)), draw.random() < 0.7, draw.choice((0.0, 0.3, 1.0)), draw.random() < 0.7
    )


def _as_rank(calls: Iterable[Call], step: str, first: int) -> Iterator[Call]:
    """Yields the calls of a step for the replica whose first rank is given."""
    for call in calls:
        yield call._replace(name=(step, first, call.name), ranks=tuple(first + worker for worker in call.ranks))


def _reductions(step: str, rank: int, workers: int, replicas: int, cells: int) -> Iterator[Call]:
    """Yields the sums over replicas behind a step: a collective for each cell of the worker."""
    group = tuple(range(rank % workers, workers * replicas, workers))
    for cell in range(cells if replicas > 1 else 0):
        yield Call("collective", (step, rank % workers, cell), group, "replicas")
    yield Call("compute", (step, "update"))


def _exchange(name: str, rank: int, size: int) -> Iterator[Call]:
    """Yields an exchange through rank 0, from host to host; before it each host needs its device's results."""
    yield Call("compute", name)
    if rank:
        yield Call("tell", (name, "to rank 0", rank), (0,))
        yield Call("hear", (name, "from rank 0"))
        return
    for other in range(1, size):
        yield Call("hear", (name, "to rank 0", other))
    yield Call("tell", (name, "from rank 0"), tuple(range(1, size)))


if __name__ == "__main__":
    first, last, until = int(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float([*sys.argv, "inf"][3])
    for seed in range(first, last):
        try:
            Machine(*drawn_run(seed), seed).run()
        except Stalled as stall:
            sys.exit(f"seed {seed}: {drawn_run(seed)[1]}\n{stall}")
        if time.monotonic() > until:
            last = seed + 1
            break
    print(f"seeds {first} to {last}: no run stalls")
