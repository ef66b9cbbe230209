"""A slow link between workers, emulated: messages travel at once and are handed over when they would arrive.

The sender stamps each message with the moment at which it would be there: sent + latency + bytes / bandwidth, where a
link carries one message after another in each direction. All processes of a machine share one monotonic clock, so the
receiver waits for that moment, if it has not passed. The bytes are those of the real model's boundary, whatever the
emulated layers put out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.boundary import BoundarySpec, TensorSpec
from gpipe_cli.pipeline.transport import PendingReceive, Transport
from gpipe_cli.schedule.instruction import Message

STAMP = TensorSpec((1,), torch.float64, False)


@dataclass(frozen=True)
class Link:
    """What a message costs, in seconds of the emulation.

    Attributes:
        carry: seconds that the message in front of each cell keeps the link busy, in either direction.
        latency: seconds from the end of sending to the arrival.
    """

    carry: tuple[float, ...]
    latency: float


class LinkTransport:
    """Delays the messages of another transport as long as `Link` says.

    Attributes:
        speed: multiplies every delay; 0 makes a warm-up step whose messages are free.
        due: when the message handed over last was to be there.
    """

    blocks_device = False

    def __init__(self, link: Link, transport: Transport) -> None:
        self.speed, self.due = 1.0, 0.0
        self._link, self._transport = link, transport
        self._free: dict[tuple[str, int], float] = {}  # when each direction of each link has sent what it was given
        self.send_spec, self.receive_spec, self.drain = transport.send_spec, transport.receive_spec, transport.drain

    @property
    def bytes_shared(self) -> int:
        return self._transport.bytes_shared

    def send(self, message: Message, tensors: Tensors, spec: BoundarySpec) -> None:
        """Stamps the message with its time of arrival."""
        way = message.direction, message.boundary
        begins = max(time.perf_counter(), self._free.get(way, 0.0))
        self._free[way] = begins + self._link.carry[message.boundary + 1] * self.speed
        arrives = self._free[way] + self._link.latency * self.speed
        stamp = torch.tensor([arrives], dtype=torch.float64)
        self._transport.send(message, (*tensors, stamp), _stamped(spec))

    def post(self, message: Message, spec: BoundarySpec) -> DelayedReceive:
        return DelayedReceive(self, self._transport.post(message, _stamped(spec)))


@dataclass
class DelayedReceive:
    """Hands a message over when it would arrive."""

    link: LinkTransport
    pending: PendingReceive

    def wait(self, separate: int = 0) -> Tensors:
        *tensors, stamp = self.pending.wait(separate + 1)
        self.link.due = float(stamp)
        time.sleep(max(0.0, self.link.due - time.perf_counter()))
        return tuple(tensors)


@lru_cache
def _stamped(spec: BoundarySpec) -> BoundarySpec:
    return replace(spec, tensors=(*spec.tensors, STAMP))


def measured_seconds(transport: LinkTransport, rank: int, messages: int, times: float) -> float:
    """Seconds a message, when worker 0 sends so many to worker 1 in a row.

    Args:
        times: how many of the messages in front of cell 1 make up one message here; 0: free ones, so that what remains
            is what sending and receiving cost on this machine.

    Returns:
        On worker 1; 0 on the others.
    """
    spec = BoundarySpec((TensorSpec((8,), torch.float32, False),))
    transport.speed = times
    begin = end = 0.0
    for number in range(messages):
        if rank == 0:
            transport.send(Message("activation", 0, number), (torch.zeros(8),), spec)
        elif rank == 1:
            transport.post(Message("activation", 0, number), spec).wait()
            end = time.perf_counter()
            if number == 0:
                begin = transport.due  # not when it was taken: that can be late, and the link would seem too fast
    transport.drain()
    return (end - begin) / (messages - 1)
