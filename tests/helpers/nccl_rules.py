"""Models what NCCL and CUDA allow for the calls of several ranks, to find orders of calls that can wait for ever.

A rank's host makes its calls in order. A call puts an operation into a queue of the rank's device and returns; the
device has one queue for computations and one for each communicator. The rules:

* Two ranks of a group have a communicator for their messages, which run one after the other, in the same order on both;
  NCCL has no tags. (In torch's `nccl` since 2.15 all messages and collectives of a group share one: `Rules.pairs`.)
* A send ends when it is in the communicator's buffer, or, if it is larger, when its receive has begun.
* A transfer begins only when all computations that were queued before it have ended.
* A transfer that has begun and cannot end may occupy the device: no computation begins meanwhile.
* A hidden synchronisation (a kernel is loaded at its first use, the allocator is short of memory) holds the host
  until the device's queues are empty.
* The first transfer of a communicator makes the connection and holds the hosts until all its ranks do so.
* A collective begins when all ranks of the communicator have called it, and must be the same one on all of them.

What happens next is drawn from all that can happen, so a stall is found again by its seed. `nccl_runs.py` records the
calls of real training steps.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

TRANSFERS = ("send", "receive", "collective")


class Call(NamedTuple):
    """Describes one call of a rank's host.

    Attributes:
        kind: ``compute``; ``send`` or ``receive``, which only begin; ``await``: later computations wait for the
            transfer of this name; ``collective``; ``read``: the host waits until its device has nothing left to do;
            ``tell`` and ``hear``: a message from host to host.
        name: of the computation, message or collective, the same at both ends.
        ranks: the communicator's: both ends of a message, all of a collective; whom to tell, or whom to hear.
        group: the process group, which has communicators of its own.
        bytes: of the message.
    """

    kind: str
    name: Hashable
    ranks: tuple[int, ...] = ()
    group: str = ""
    bytes: int = 1

    def __str__(self) -> str:
        place = f" on {f'{self.group} ' * bool(self.group)}{self.ranks}" if self.kind in TRANSFERS else ""
        return f"{self.kind} {shown(self.name)}{place}"


@dataclass(frozen=True)
class Rules:
    """Describes the devices and the network.

    Attributes:
        buffer: bytes of a communicator's buffer in each direction; 0: every send waits for its receive.
        occupies: whether a transfer that waits keeps computations from beginning.
        hidden_syncs: probability that a computation needs a hidden synchronisation first.
        connected: whether the connections exist already.
        pairs: whether two ranks of a group have a communicator of their own for messages; else the group has one for
            everything, made with the group.
    """

    buffer: int = 0
    occupies: bool = True
    hidden_syncs: float = 0.5
    connected: bool = True
    pairs: bool = True


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
    ended: set[tuple[bool, Hashable]] = field(default_factory=set)  # transfers: whether it is a send, and its name

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


class Machine:
    """Runs the programs of all ranks under the rules, in an order drawn by the seed.

    Raises (from `run`):
        Stalled: with the host's call and the begun transfers of every rank.
        WrongUse: with both ends.
    """

    def __init__(self, programs: Sequence[Iterable[Call]], rules: Rules, seed: int = 0) -> None:
        self.rules, self._draw = rules, random.Random(seed)
        self.ranks = [Rank(number, iter(program)) for number, program in enumerate(programs)]
        self._buffers: dict[Hashable, deque[Call]] = defaultdict(deque)  # by communicator, sender and receiver
        self._connected: set[Hashable] = set()
        self._told: set[Hashable] = set()
        self._active = list(self.ranks)
        self._orders = list(permutations((self._host, self._compute, self._begin)))

    def run(self) -> None:
        """Runs until all ranks have ended."""
        while self._active:
            place = int(self._draw.random() * len(self._active))
            rank = self._active[place]
            if not self._step(rank):
                self._active[place] = self._active[-1]
                self._active.pop()
        if not all(rank.finished for rank in self.ranks):
            waiting = (f"rank {rank.number}: {rank.call}, {[*rank.begun.values()]}" for rank in self.ranks)
            raise Stalled("\n".join(waiting))

    def _wake(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.ranks[number] not in self._active:
                self._active.append(self.ranks[number])

    def _step(self, rank: Rank) -> bool:
        """Does one of the things that the rank can do; returns whether there was one."""
        first, second, third = self._orders[int(self._draw.random() * len(self._orders))]
        return first(rank) or second(rank) or third(rank)

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
        elif call.kind == "read":
            if not rank.idle:
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
            rank.transfers[self._communicator(call)].append(Transfer(call, rank.queued))
        rank.advance()
        return True

    def _communicator(self, call: Call) -> Hashable:
        return (call.group, call.ranks) if self.rules.pairs else call.group

    def _connects(self, rank: Rank, call: Call) -> bool:
        communicator = call.group, call.ranks
        if self.rules.connected or not self.rules.pairs or communicator in self._connected:
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
            if (call.group == "sent", call.name) not in rank.ended:
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
                raise WrongUse(f"rank {number} calls {other} where another calls {call}")
        if all(begun):
            for number in call.ranks:
                self._end(communicator, self.ranks[number])

    def _match(self, communicator: Hashable, begins: Call | None, sender: Rank, receiver: Rank) -> None:
        """Ends what can end of the messages from sender to receiver; ``begins``: a send that has just begun."""
        buffer = self._buffers[communicator, sender.number, receiver.number]
        sent, awaited = sender.begun.get(communicator), receiver.begun.get(communicator)
        both = {sender.number, receiver.number}
        sent = sent if sent and sent.kind == "send" and both == set(sent.ranks) else None
        awaited = awaited if awaited and awaited.kind == "receive" and both == set(awaited.ranks) else None
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
                f"rank {sender.number} sends {shown(first.name)} where rank {receiver.number} receives "
                f"{shown(awaited.name)} (communicator {communicator})"
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
        rank.ended.add((call.kind == "send", call.name))
        self._wake([rank.number])


def shown(name: Hashable) -> str:
    """Returns the name of a call for people."""
    return " ".join(map(shown, name)) if isinstance(name, tuple) else str(name)
