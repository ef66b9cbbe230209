"""Models what NCCL and CUDA allow for the calls of several ranks, to find orders of calls that can wait for ever.

A rank's host makes its calls in order. A message or a collective is put into a queue of the rank's device, one for each
communicator. The rules are the strictest of any device and network: what ends under them ends everywhere.

* Two ranks of a group have a communicator for their messages, which run one after the other, in the same order on both;
  NCCL has no tags. (In torch's `nccl` since 2.15 all messages and collectives of a group share one: not `pairs`.)
* A send ends when its receive has begun: there is no buffer.
* A computation may need a hidden synchronisation (a kernel is loaded at its first use, the allocator is short of
  memory): it holds the host until the device's queues are empty. Here each one does.
* The first transfer of a communicator makes the connection and holds the hosts until all its ranks do so.
* A collective begins when all ranks of the communicator have called it, and must be the same one on all of them.

What can happen only adds to what can happen next, so one order of events stands for all. `nccl_runs.py` records the
calls of real training steps.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple

TRANSFERS = ("send", "receive", "collective")


class Call(NamedTuple):
    """Describes one call of a rank's host.

    Attributes:
        kind: ``compute``; ``send`` or ``receive``, which only begin; ``collective``; ``read``: the host waits until its
            device has nothing left to do; ``tell`` and ``hear``: a message from host to host.
        name: name of the computation, message or collective, the same at both ends.
        ranks: the communicator's: both ends of a message, all of a collective; whom to tell, or whom to hear.
        group: the process group, which has communicators of its own.
    """

    kind: str
    name: Hashable
    ranks: tuple[int, ...] = ()
    group: str = ""


class Stalled(Exception):
    """Raised when ranks wait for each other."""


class WrongUse(Exception):
    """Raised when calls of two ranks do not fit together."""


class Machine:
    """Runs the programs of all ranks under the rules.

    Raises (from `run`):
        Stalled: with the host's next call and the first transfers of every rank.
        WrongUse: with both ends.
    """

    def __init__(self, programs: Iterable[Iterable[Call]], pairs: bool) -> None:
        self.hosts = [deque(program) for program in programs]
        self.queues: dict[Hashable, list[deque[Call]]] = defaultdict(lambda: [deque() for _ in self.hosts])
        self._pairs = pairs
        self._told: set[Hashable] = set()
        self._connecting: dict[Hashable, set[int]] = defaultdict(set)

    def run(self) -> None:
        """Runs until all ranks have ended."""
        while any(self._host(rank) for rank in range(len(self.hosts))):
            for queues in self.queues.values():
                while any(self._ended(rank, queues) for rank in range(len(queues))):
                    pass
        waiting = [[*[*host][:1], *self._first_transfers(rank)] for rank, host in enumerate(self.hosts)]
        if any(waiting):
            raise Stalled("\n".join(f"rank {rank}: {calls}" for rank, calls in enumerate(waiting)))

    def _first_transfers(self, rank: int) -> list[Call]:
        return [queues[rank][0] for queues in self.queues.values() if queues[rank]]

    def _host(self, rank: int) -> bool:
        """Makes a rank's calls until one waits; returns whether any was made."""
        before, host = len(self.hosts[rank]), self.hosts[rank]
        while host and self._call(rank, host[0]):
            host.popleft()
        return len(host) < before

    def _call(self, rank: int, call: Call) -> bool:
        if call.kind in TRANSFERS:
            met = self._connecting[call.group, call.ranks]
            met.add(rank)
            if self._pairs and met != {*call.ranks}:
                return False
            self.queues[(call.group, call.ranks) if self._pairs else call.group][rank].append(call)
        elif call.kind == "tell":
            self._told.add(call.name)
        elif call.kind == "hear":
            return call.name in self._told
        else:
            return not self._first_transfers(rank)
        return True

    def _ended(self, rank: int, queues: list[deque[Call]]) -> bool:
        """Ends a rank's first transfer on a communicator if it is the first one of all its ranks."""
        call = queues[rank][0] if queues[rank] else None
        if call is None or not all(queues[other] and _fit(call, queues[other][0]) for other in {*call.ranks} - {rank}):
            return False
        for other in call.ranks:
            queues[other].popleft()
        return True


def _fit(one: Call, other: Call) -> bool:
    """Returns whether two calls are ends of one transfer.

    Raises:
        WrongUse: they are ends of two transfers, and each comes first.
    """
    if one.ranks != other.ranks or one.kind == other.kind != "collective":
        return False  # the other is about another transfer, or both send, or both receive
    if one.name != other.name:
        raise WrongUse(f"{one} where another rank calls {other}")
    return True
