"""Defines the interface of messages between workers, and chooses how they travel.

One message carries one boundary of one micro-batch. Both ends name it by the same `Message` and know its size
beforehand: the first message of a boundary is preceded by its `BoundarySpec`, which both ends keep.

A new implementation needs the methods of `Transport` and a line in `connect_workers`; the engine sees nothing else.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from ...gpus import GPU
from ...micro_batch import Tensors
from ...schedule.instruction import Message
from .boundary import BoundarySpec
from .process_group import ProcessGroupTransport, Wait
from .shared_memory import SharedMemoryTransport, Sockets


class Transport(Protocol):
    """Sends and receives boundaries for one worker of a pipeline.

    Order: messages of one direction between two workers arrive in the order in which they are sent, and receives are
    posted in that order; every kind of schedule does so. The two directions do not wait for each other. Steps need no
    mark: the exchange of all workers between two steps separates their messages.
    """

    @property
    def blocks_device(self) -> bool:
        """Returns whether a posted receive occupies the device until its message comes (see `schedule/posting.py`)."""

    def send(self, message: Message, tensors: Tensors, spec: BoundarySpec) -> None:
        """Starts to send; the caller may let go of the tensors at once, but must not write into them.

        Waits only while `send_window` messages of the direction are on their way, for the oldest of them.

        Raises:
            RuntimeError: the receiver has ended, or takes nothing for too long.
        """

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        """Starts to receive, without waiting; returns the function that waits and returns the tensors on the device.

        Its argument is how many tensors at the end get memory of their own, so that keeping them does not keep the
        whole message. It raises RuntimeError when the sender has ended, or sends nothing for too long.
        """

    def send_spec(self, boundary: int, spec: BoundarySpec) -> None:
        """Sends the description of the activations behind cell ``boundary``; never waits."""

    def receive_spec(self, boundary: int) -> BoundarySpec:
        """Waits for the description that `send_spec` sends and returns it."""

    def drain(self) -> None:
        """Waits until every message has left; the engine calls it at the end of a step."""


def connect_workers(
    ranks: tuple[int, ...],
    device: torch.device,
    wire: torch.device,
    groups: tuple[dist.ProcessGroup, ...],
    control: dist.ProcessGroup,
) -> Transport:
    """Connects this worker with those of the neighbouring cells; all workers of the pipeline call it at the same time.

    Args:
        ranks: global rank of the worker of each cell, in this replica.
        device: where the tensors are used.
        wire: where messages travel from and to: ``device``, or the CPU when the backend cannot send from the device.
        groups: one process group for activations and one for gradients, so that neither waits for the other. Or two of
            each: one for messages to a later rank, one for messages to an earlier rank. A backend that runs the
            messages between two ranks in one order (NCCL) needs that where messages of a kind go both ways.
        control: a CPU group for descriptions. If it is that of one machine (launch/local_group.py), messages from CPU
            to CPU go through memory that both workers share.
    """
    transport = ProcessGroupTransport(ranks, device, wire, groups, control)
    if wire.type == GPU:
        transport.exchange_first_messages()
        torch.cuda.synchronize(wire)
    elif isinstance(control, Sockets):
        return SharedMemoryTransport(transport, ranks, device, control)
    return transport
