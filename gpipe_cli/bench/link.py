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
import torch.distributed as dist

from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.boundary import BoundarySpec, TensorSpec
from gpipe_cli.pipeline.transport import ACTIVATION, PendingReceive, Transport

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


class LinkTransport(Transport):
    """A transport whose messages take as long as `Link` says.

    Args:
        link: what they cost; the others are those of `Transport`.

    Attributes:
        speed: multiplies every cost; 0 makes a warm-up step whose messages are free.
        due: when the message handed over last was to be there.
    """

    def __init__(
        self,
        link: Link,
        ranks: tuple[int, ...],
        device: torch.device,
        wire: torch.device,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        control: dist.ProcessGroup,
    ) -> None:
        super().__init__(ranks, device, wire, groups, control)
        self.speed, self.due = 1.0, 0.0
        self._link = link
        self._free: dict[tuple[int, int], float] = {}  # when the link in this direction has sent what it was given

    def send(self, kind: int, tensors: Tensors, spec: BoundarySpec, to_cell: int, tag_cell: int, number: int) -> None:
        """Stamps the message with its time of arrival."""
        direction = (kind, self._ranks[to_cell])
        begins = max(time.perf_counter(), self._free.get(direction, 0.0))
        self._free[direction] = begins + self._link.carry[tag_cell] * self.speed
        arrives = self._free[direction] + self._link.latency * self.speed
        stamp = torch.tensor([arrives], dtype=torch.float64)
        super().send(kind, (*tensors, stamp), _stamped(spec), to_cell, tag_cell, number)

    def post(self, kind: int, spec: BoundarySpec, from_cell: int, tag_cell: int, number: int) -> PendingReceive:
        return super().post(kind, _stamped(spec), from_cell, tag_cell, number)

    def finish(self, pending: PendingReceive, apart: int = 0) -> Tensors:
        """Waits for the message, and then until it would be there."""
        *tensors, stamp = super().finish(pending, apart + 1)
        self.due = float(stamp)
        time.sleep(max(0.0, self.due - time.perf_counter()))
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
            transport.send(ACTIVATION, (torch.zeros(8),), spec, 1, 1, number)
        elif rank == 1:
            transport.finish(transport.post(ACTIVATION, spec, 0, 1, number))
            end = time.perf_counter()
            if number == 0:
                begin = transport.due  # not when it was taken: that can be late, and the link would seem too fast
    transport.drain()
    return (end - begin) / (messages - 1)
