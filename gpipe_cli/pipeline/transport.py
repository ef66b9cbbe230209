"""Messages between workers: receives are posted before they are needed, a send waits for none of the latest ones.

One message carries one boundary of one micro-batch, packed. Both sides know its size without asking: the plan of the
mini-batch names the shapes that enter the pipeline, and for each such shape the first message on an edge is preceded
by a description of the boundary, which both sides remember.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..micro_batch import Tensors
from ..schedule.instruction import send_window
from .boundary import BoundarySpec, pack, unpack
from .shared_memory import Incoming, Outgoing, connect_receiver, connect_sender

# Message tags: kind, then cell, then micro-batch. Steps need no tag: the exchange that ends each step separates them.
ACTIVATION, GRADIENT, DESCRIPTION = 0, 1, 2
MICRO_BATCHES_AT_MOST = 1 << 15
_FIRST_MESSAGES = (64, 4 << 20)  # bytes; for a large one NCCL connects more channels
_PATIENCE = 1800.0  # seconds, as a process group's: a peer that dies is noticed at once, this is for one that hangs


@dataclass
class PendingReceive:
    """A receive that has been posted; in a channel of shared memory there is nothing to do until it is finished."""

    spec: BoundarySpec
    tag: int
    work: dist.Work | None = None
    message: Tensor | None = None
    channel: Incoming | None = None


class Transport:
    """Sends and receives boundaries for one worker.

    Attributes:
        blocks_device: a receive that has been posted occupies the device until its message is there.

    Args:
        ranks: global rank of the worker of each cell, in this replica.
        device: where the tensors are used.
        wire: where messages travel from and to: ``device``, or the CPU when the backend cannot send from the device.
        groups: one process group for activations and one for gradients, so that neither waits for the other. Or two of
            each: one for messages to a later worker, one for messages to an earlier one. A backend that runs the
            messages between two workers in one order (NCCL) needs that where messages of a kind go both ways.
        control: a CPU group for descriptions.
        shared_memory: where messages travel from CPU to CPU and both workers are on one machine, they go through memory
            and not through the process group.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        wire: torch.device,
        groups: tuple[dist.ProcessGroup, ...],
        control: dist.ProcessGroup,
        shared_memory: bool = True,
    ) -> None:
        self._ranks, self._device, self._wire = ranks, device, wire
        self._groups, self._control = groups, control
        self._rank = dist.get_rank()
        window = send_window(len(set(ranks)))
        self._window = window if wire.type == "cpu" else None
        self._sending: dict[int, deque[tuple[dist.Work | None, Tensor]]] = defaultdict(deque)  # by kind, in order
        self._described: dict[tuple[int, Hashable], BoundarySpec] = {}
        self._outgoing: dict[tuple[int, int], Outgoing] = {}  # by kind and rank
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self.blocks_device = wire.type == "cuda"
        if shared_memory and not self.blocks_device:
            self._share_memory(window)
        if self.blocks_device:
            self.connect()
            torch.cuda.synchronize(wire)

    def connect(self) -> None:
        """A message each way over every edge, edge by edge: all workers of the pipeline call it at the same time.

        NCCL makes the connection of two ranks when they first talk, and holds the host until both do. In a step one of
        them may be waiting for something else from the other.
        """
        for kind, by, to in self._ways():
            for size in _FIRST_MESSAGES:
                token = torch.zeros(size, dtype=torch.uint8, device=self._wire)
                if self._rank == by:
                    dist.send(token, to, group=self._group(kind, to > by))
                elif self._rank == to:
                    dist.recv(token, by, group=self._group(kind, to > by))

    def _share_memory(self, window: int) -> None:
        """Connects each way on which both workers can see the same memory; all of them call it at the same time."""
        tag = _tag(DESCRIPTION, 0, 0)
        for kind, by, to in self._ways():
            if self._rank == by and (peer := connect_sender(to, self._control, tag, _PATIENCE)):
                self._outgoing[kind, to] = Outgoing(peer, to, window)
            elif self._rank == to and (peer := connect_receiver(by, self._control, tag, _PATIENCE)):
                self._incoming[kind, by] = Incoming(peer, by, self._device)

    def _ways(self) -> Iterator[tuple[int, int, int]]:
        """(kind, sender, receiver) of all messages between workers, in the same order everywhere."""
        for one, next_one in dict.fromkeys(pairwise(self._ranks)):
            if one != next_one:
                yield ACTIVATION, one, next_one
                yield GRADIENT, next_one, one

    def send(self, kind: int, tensors: Tensors, spec: BoundarySpec, to_cell: int, tag_cell: int, number: int) -> None:
        """Starts sending and returns; the message is kept until it has left, or copied into memory that both share.

        gloo says that only when asked to wait for it, so there the oldest is waited for when `send_window` are kept: as
        a rule it has long arrived, and that the wait ends is a rule of schedules (`validate`).
        """
        to, tag = self._ranks[to_cell], _tag(kind, tag_cell, number)
        channel = self._outgoing.get((kind, to))
        if channel is not None and spec.size:
            channel.send(tensors, spec, tag)
            return
        kept = self._sending[kind]
        if len(kept) == self._window:
            _finish_oldest(kept)
        self._let_go()
        message = pack(tensors, spec, self._wire)
        if message.numel() == 0:
            return
        work = dist.isend(message, to, group=self._group(kind, to > self._rank), tag=tag)
        kept.append((work, message))

    def post(self, kind: int, spec: BoundarySpec, from_cell: int, tag_cell: int, number: int) -> PendingReceive:
        """Starts a receive; `finish` waits for it."""
        by, tag = self._ranks[from_cell], _tag(kind, tag_cell, number)
        channel = self._incoming.get((kind, by))
        if channel is not None and spec.size:
            return PendingReceive(spec, tag, channel=channel)
        message = torch.empty(spec.size, dtype=torch.uint8, device=self._wire)
        if message.numel() == 0:
            return PendingReceive(spec, tag, message=message)
        work = dist.irecv(message, by, group=self._group(kind, by < self._rank), tag=tag)
        return PendingReceive(spec, tag, work, message)

    @property
    def bytes_shared(self) -> int:
        """Of the memory that this worker shares with those that it sends to."""
        return sum(channel.bytes_shared for channel in self._outgoing.values())

    def _group(self, kind: int, to_later: bool) -> dist.ProcessGroup:
        return self._groups[kind if len(self._groups) == 2 or to_later else kind + 2]

    def finish(self, pending: PendingReceive, apart: int = 0) -> Tensors:
        """Waits until the message is there and returns its tensors on the device.

        Args:
            apart: so many at the end have memory of their own, so that none of them keeps the message.
        """
        if pending.channel is not None:
            return pending.channel.receive(pending.spec, pending.tag)
        assert pending.message is not None
        if pending.work is not None:
            pending.work.wait()
        self._let_go()
        tensors = unpack(pending.message.to(self._device), pending.spec)
        split = len(tensors) - apart
        return (*tensors[:split], *(tensor.clone() for tensor in tensors[split:]))

    def known(self, cell: int, signature: Hashable) -> BoundarySpec | None:
        """The boundary in front of ``cell`` for micro-batches of this signature, if it was described before."""
        return self._described.get((cell, signature))

    def describe(self, cell: int, signature: Hashable, spec: BoundarySpec) -> None:
        """Tells the worker of ``cell`` what the boundary looks like, the first time the signature occurs."""
        if (cell, signature) in self._described:
            return
        self._described[(cell, signature)] = spec
        text = torch.tensor(list(spec.to_bytes()), dtype=torch.uint8)
        for part in (torch.tensor([len(text)]), text):
            work = dist.isend(part, self._ranks[cell], group=self._control, tag=_tag(DESCRIPTION, cell, 0))
            self._sending[DESCRIPTION].append((work, part))

    def learn(self, cell: int, from_cell: int, signature: Hashable) -> BoundarySpec:
        """The receiving side of `describe`."""
        size = torch.zeros(1, dtype=torch.int64)
        tag = _tag(DESCRIPTION, cell, 0)
        dist.recv(size, self._ranks[from_cell], group=self._control, tag=tag)
        text = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(text, self._ranks[from_cell], group=self._control, tag=tag)
        spec = BoundarySpec.from_bytes(bytes(text.tolist()))
        self._described[(cell, signature)] = spec
        return spec

    def _let_go(self) -> None:
        """Of messages that have left: a worker that only receives from now on would keep them until the step ends."""
        if self._window is not None:
            return
        for kept in self._sending.values():
            while kept and (kept[0][0] is None or kept[0][0].is_completed()):
                kept.popleft()

    def drain(self) -> None:
        """Waits until every message has left (the end of a step)."""
        for kept in self._sending.values():
            while kept:
                _finish_oldest(kept)


def _finish_oldest(kept: deque[tuple[dist.Work | None, Tensor]]) -> None:
    work, _ = kept.popleft()
    if work is not None:
        work.wait()


def _tag(kind: int, cell: int, number: int) -> int:
    return (kind << 26 | cell << 15 | number) + 1
