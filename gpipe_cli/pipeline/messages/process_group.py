"""Implements `Transport` with a process group of torch.distributed: gloo between CPUs, NCCL between GPUs."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import TAGS_PER_CELL
from ...gpus import GPU
from ...micro_batch import Tensors
from ...schedule.instruction import Message, send_window
from .boundary import BoundarySpec, pack, unpack

Wait = Callable[[int], Tensors]  # see `Transport.post`
DIRECTIONS = ("activation", "gradient")
_FIRST_MESSAGES = (64, 4 << 20)  # bytes; for a large one NCCL connects more channels


def message_tag(message: Message, K: int) -> int:
    """Returns a number that no other message of a step of K cells has, below `MESSAGE_TAGS` (`config.py`)."""
    return (message.micro_batch * K + message.boundary) * TAGS_PER_CELL + DIRECTIONS.index(message.direction) + 1


def spec_tag(boundary: int) -> int:
    """Returns the tag of a boundary's description; no message has it."""
    return TAGS_PER_CELL * boundary + 3


def flags_tag(message: Message, K: int) -> int:
    """Returns the tag of the message that the CPU group carries beside another one; nothing else has it."""
    return message_tag(message, K) + 3


def routes(ranks: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yields (direction, sender, receiver) of all ways that messages take, in the same order on every rank."""
    for one, next_one in dict.fromkeys(pairwise(ranks)):
        if one != next_one:
            yield "activation", one, next_one
            yield "gradient", next_one, one


class ProcessGroupTransport:
    """Sends packed boundaries through process groups; the arguments are those of `connect_workers`."""

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

    def send(self, message: Message, tensors: Tensors, spec: BoundarySpec) -> None:
        """Implements `Transport.send`; with gloo it waits for the oldest message once `send_window` messages are kept.

        As a rule the oldest has long arrived; for every kind of schedule this wait ends.
        """
        sending = self._sending[message.direction]
        if len(sending) == self._window:
            _finish_oldest(sending)
        self._forget_sent()
        receiver, number = self._ranks[message.receiver], self._aside(spec)
        flags = () if number is None else tensors[number : number + 1]
        if number is not None:
            tensors, spec = tensors[:number] + tensors[number + 1 :], spec.without_flags
        content = pack(tensors, spec, self._wire)  # which may fail, before anything is on its way
        for one in flags:
            work = dist.isend(one, receiver, group=self._control, tag=flags_tag(message, len(self._ranks)))
            self._sending["flags"].append((work, one))
        if content.numel() == 0:
            return
        group = self._group(message.direction, self._rank, receiver)
        work = dist.isend(content, receiver, group=group, tag=message_tag(message, len(self._ranks)))
        sending.append((work, content))

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        sender, number, K = self._ranks[message.sender], self._aside(spec), len(self._ranks)
        works: list[dist.Work | None] = []
        flags = None
        if number is not None:
            flags = torch.empty(spec.tensors[number].shape, dtype=spec.tensors[number].dtype)
            works.append(dist.irecv(flags, sender, group=self._control, tag=flags_tag(message, K)))
            spec = spec.without_flags
        content = torch.empty(spec.size, dtype=torch.uint8, device=self._wire)
        if spec.size:
            group = self._group(message.direction, sender, self._rank)
            works.append(dist.irecv(content, sender, group=group, tag=message_tag(message, K)))

        def wait(separate: int) -> Tensors:
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()
            self._forget_sent()
            tensors = list(unpack(content.to(self._device), spec))
            if flags is not None and number is not None:
                tensors.insert(number, flags)
            elif spec.flags is not None:
                tensors[spec.flags] = unpack(content, spec)[spec.flags]
            split = len(tensors) - separate
            return (*tensors[:split], *(tensor.clone() for tensor in tensors[split:]))

        return wait

    def _aside(self, spec: BoundarySpec) -> int | None:
        """Returns the index of flags that the CPU group carries, so that reading them does not wait for the device."""
        return spec.flags if self.blocks_device else None

    def send_spec(self, boundary: int, spec: BoundarySpec) -> None:
        text = torch.frombuffer(bytearray(spec.to_json().encode()), dtype=torch.uint8)
        for content in (torch.tensor([len(text)]), text):
            work = dist.isend(content, self._ranks[boundary + 1], group=self._control, tag=spec_tag(boundary))
            self._sending["spec"].append((work, content))

    def receive_spec(self, boundary: int) -> BoundarySpec:
        sender, tag = self._ranks[boundary], spec_tag(boundary)
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, sender, group=self._control, tag=tag)
        text = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(text, sender, group=self._control, tag=tag)
        return BoundarySpec.from_json(bytes(text.tolist()).decode())

    def drain(self) -> None:
        for sending in self._sending.values():
            while sending:
                _finish_oldest(sending)

    def _group(self, direction: str, sender: int, receiver: int) -> dist.ProcessGroup:
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
    work, _ = sending.popleft()
    if work is not None:
        work.wait()
