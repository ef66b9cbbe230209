"""Sends messages between workers with process groups of torch.distributed: gloo between CPUs, NCCL between GPUs.

One message carries one boundary of one micro-batch. Both ends know its size beforehand: the first message of a boundary
is preceded by its `BoundarySpec`, which both ends keep. A tag says of which kind a message is; among those of one kind
between two workers only their order says which it is.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ...gpus import GPU
from ...micro_batch import Tensors
from ...schedule.instruction import Message, send_window
from .boundary import BoundarySpec, pack, unpack

Wait = Callable[[int], Tensors]  # see `Transport.post`
DIRECTIONS = ("activation", "gradient")
_TAGS = {"activation": 1, "gradient": 2}
_FLAGS_TAGS = {"activation": 3, "gradient": 4}  # of the messages that the CPU group carries beside others
_SPEC_TAG = 5
_FIRST_MESSAGES = (64, 4 << 20)  # bytes; for a large one NCCL connects more channels


def routes(ranks: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yields (direction, sender, receiver) of all ways that messages take, in the same order on every rank.

    Every second boundary comes first, so that workers connect in pairs at the same time, not one after another.
    """
    boundaries = [(one, next_one) for one, next_one in dict.fromkeys(pairwise(ranks)) if one != next_one]
    for one, next_one in boundaries[::2] + boundaries[1::2]:
        yield "activation", one, next_one
        yield "gradient", next_one, one


class Transport:
    """Sends and receives packed boundaries for one worker of a pipeline.

    Order: messages of one direction between two workers arrive in the order in which they are sent, and receives are
    posted in that order; every kind of schedule does so. The two directions do not wait for each other. Steps need no
    mark: the exchange of all workers between two steps separates their messages.

    All workers of the pipeline make theirs at the same time.

    Args:
        ranks: global rank of the worker of each cell, in this replica.
        device: device on which the tensors are used.
        wire: device from and to which messages travel: ``device``, or the CPU when the backend cannot send from it.
        groups: one process group for activations and one for gradients, so that neither waits for the other. Or two of
            each: one for messages to a later rank, one for messages to an earlier rank. A backend that runs the
            messages between two ranks in one order (NCCL) needs that where messages of a kind go both ways.
        control: a CPU group for descriptions.

    Attributes:
        blocks_device: True if a posted receive occupies the device until its message comes (`schedule/posting.py`).
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        wire: torch.device,
        groups: tuple[dist.ProcessGroup, ...],
        control: dist.ProcessGroup,
    ) -> None:
        self._ranks, self._device, self._wire = ranks, device, wire
        self._groups, self._control = groups, control
        self._rank = dist.get_rank()
        self.blocks_device = wire.type == GPU
        # gloo reports that a message has left only to a caller that waits for it; NCCL can be asked.
        self._window = None if self.blocks_device else send_window(len(set(ranks)))
        self._sending: dict[str, deque[tuple[dist.Work | None, Tensor]]] = defaultdict(deque)  # by direction, in order
        self._connect()

    def _connect(self) -> None:
        """Connects this worker with its neighbours, before the first step."""
        if self.blocks_device:
            self.exchange_first_messages()
            torch.cuda.synchronize(self._wire)

    def exchange_first_messages(self) -> None:
        """Sends a message each way over every edge, edge by edge; all workers of the pipeline call it at the same time.

        NCCL makes the connection of two ranks when they first exchange a message, and holds the host until both do. In
        a step one of them may be waiting for something else from the other.
        """
        for direction, sender, receiver in routes(self._ranks):
            group = self._group(direction, sender, receiver)
            for size in _FIRST_MESSAGES:
                content = torch.zeros(size, dtype=torch.uint8, device=self._wire)
                if self._rank == sender:
                    dist.send(content, receiver, group=group)
                elif self._rank == receiver:
                    dist.recv(content, sender, group=group)

    def send(self, message: Message, tensors: Sequence[Tensor], spec: BoundarySpec) -> None:
        """Starts to send a message. The caller may forget its tensors at once, but must not write into them.

        With gloo this waits for the oldest message once `send_window` messages of the direction are kept. As a rule
        that one has long arrived. For every kind of schedule the wait ends.

        Raises:
            RuntimeError: the receiver has ended, or takes nothing for too long.
        """
        sending = self._sending[message.direction]
        if len(sending) == self._window:
            _finish_oldest(sending)
        self._forget_sent()
        receiver, flags = self._ranks[message.receiver], None
        if self._puts_flags_aside(spec):
            *tensors, flags = tensors
            spec = spec.without_flags
        content = pack(tensors, spec, self._wire)  # first, because it may fail, and nothing must be on its way then
        if flags is not None:
            work = dist.isend(flags, receiver, group=self._control, tag=_FLAGS_TAGS[message.direction])
            self._sending["flags"].append((work, flags))
        if content.numel() == 0:
            return
        group = self._group(message.direction, self._rank, receiver)
        work = dist.isend(content, receiver, group=group, tag=_TAGS[message.direction])
        sending.append((work, content))

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        """Starts to receive a message, and returns a function that waits for it.

        The function returns the message's tensors on the device. Its argument is how many of the last tensors get
        memory of their own, so that keeping them does not keep the whole message. It raises RuntimeError when the
        sender has ended, or sends nothing for too long.

        Flags, the last tensor if there are any, say which tensors require a gradient. They stay on the CPU, which
        reads them at once. From a GPU they come apart from the rest, so that they do not wait for it.
        """
        sender, direction = self._ranks[message.sender], message.direction
        works: list[dist.Work | None] = []
        flags = None
        if self._puts_flags_aside(spec):
            flags = torch.empty(spec.tensors[-1].shape, dtype=spec.tensors[-1].dtype)
            works.append(dist.irecv(flags, sender, group=self._control, tag=_FLAGS_TAGS[direction]))
            spec = spec.without_flags
        content = torch.empty(spec.size, dtype=torch.uint8, device=self._wire)
        if spec.size:
            group = self._group(direction, sender, self._rank)
            works.append(dist.irecv(content, sender, group=group, tag=_TAGS[direction]))

        def wait(separate: int) -> Tensors:
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()
            self._forget_sent()
            tensors = list(unpack(content.to(self._device), spec))
            if flags is not None:
                tensors.append(flags)
            elif spec.has_flags:  # from the message as it came, which is on the CPU
                tensors[-1] = unpack(content, spec)[-1]
            split = len(tensors) - separate
            return (*tensors[:split], *(tensor.clone() for tensor in tensors[split:]))

        return wait

    def _puts_flags_aside(self, spec: BoundarySpec) -> bool:
        """Returns whether the CPU group carries the flags, so that reading them does not wait for the device."""
        return self.blocks_device and spec.has_flags

    def send_spec(self, boundary: int, spec: BoundarySpec) -> None:
        """Sends the description of the activations behind cell ``boundary``; never waits."""
        text = torch.frombuffer(bytearray(spec.to_json().encode()), dtype=torch.uint8)
        for content in (torch.tensor([len(text)]), text):
            work = dist.isend(content, self._ranks[boundary + 1], group=self._control, tag=_SPEC_TAG)
            self._sending["spec"].append((work, content))

    def receive_spec(self, boundary: int) -> BoundarySpec:
        """Waits for the description that `send_spec` sends and returns it."""
        sender, size = self._ranks[boundary], torch.zeros(1, dtype=torch.int64)
        dist.recv(size, sender, group=self._control, tag=_SPEC_TAG)
        text = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(text, sender, group=self._control, tag=_SPEC_TAG)
        return BoundarySpec.from_json(bytes(text.tolist()).decode())

    def drain(self) -> None:
        """Waits until every message has left; the engine calls it at the end of a step."""
        for sending in self._sending.values():
            while sending:
                _finish_oldest(sending)

    def _group(self, direction: str, sender: int, receiver: int) -> dist.ProcessGroup:
        """Returns the process group of the messages of one direction between two ranks."""
        number = DIRECTIONS.index(direction)
        return self._groups[number if len(self._groups) == 2 or sender < receiver else number + 2]

    def _forget_sent(self) -> None:
        """Frees messages that have left; otherwise a worker that only receives would keep them until the step ends."""
        if self._window is not None:
            return
        for sending in self._sending.values():
            while sending and (sending[0][0] is None or sending[0][0].is_completed()):
                sending.popleft()


def _finish_oldest(sending: deque[tuple[dist.Work | None, Tensor]]) -> None:
    """Waits until the oldest message has left, and frees it."""
    work, _ = sending.popleft()
    if work is not None:
        work.wait()
