"""Emulates accelerators and slow links: layers and messages that take as long as they would on a real device.

A layer sleeps as long as a device would compute, so K workers need no K devices. A sleep ends late by tens of
microseconds, and later when the processor is busy; after it even a small addition is slow, on a cold cache. That
belongs to the emulation, so whatever a layer took too long is subtracted from the next sleep: in forward from the first
line of the module to its last, in backward from the first line of its node until its weight has its gradient. Time
between two layers (the module's call, autograd's way from node to node, the engine, messages) is not subtracted; the
plain loop's own efficiency measures the first two of these.

A message travels at once and is handed over when it would arrive: the sender stamps it with that moment, sent +
latency + bytes / bandwidth, where a link carries one message after another in each direction. All processes of a
machine share one monotonic clock, so the receiver waits for that moment, if it has not passed.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.pipeline.messages.boundary import BoundarySpec, TensorSpec
from gpipe_cli.pipeline.messages.transport import Transport, Wait
from gpipe_cli.schedule.instruction import Message

from .steps import Step, cpu_transport
from .throughput import BACKWARD
from .timing import StopWatch

WIDTH = 8  # of the boundary: small, because its real size costs no time here
EXAMPLES = 64  # rows of the emulated mini-batch, unrelated to the model's
PRIORITY = 10  # of a real-time process
STAMP = TensorSpec((1,), torch.float64, False)


class Accelerator:
    """Describes the emulated device of this process.

    Attributes:
        speed: factor of every duration; 0 makes a warm-up step that takes no time.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self.reset()

    def reset(self) -> None:
        """Forgets the time that is still to be subtracted from a sleep."""
        self._overshoot = 0.0
        self._due = 0.0

    def begin(self, seconds: float) -> None:
        """Sleeps for most of ``seconds``; the first line of a computation that takes as long."""
        now = time.perf_counter()
        self._due = now + seconds * self.speed - self._overshoot
        if self._due > now:
            time.sleep(self._due - now)

    def end(self) -> None:
        """Measures by how much the computation was late; its last line."""
        self._overshoot = time.perf_counter() - self._due


ACCELERATOR = Accelerator()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)  # torch.utils.checkpoint recomputes only for a graph that has saved something
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ACCELERATOR.begin(ctx.seconds * BACKWARD)
        ACCELERATOR.end()
        _ = ctx.saved_tensors  # here torch.utils.checkpoint runs forward again: layers that take their own time
        ACCELERATOR.begin(0.0)
        return gradients[0], gradients[0].sum(), None  # ends when the weight has its gradient


class SleepingLayer(nn.Module):
    """Maps x [b, WIDTH] to x + weight in ``seconds``; its backward takes twice as long.

    Args:
        divisible: the gradients of x and of the weight are two nodes of autograd that take half a backward each, for a
            schedule that computes them apart. For other schedules one node is nearer to what a layer costs beside its
            sleep.
    """

    def __init__(self, seconds: float, divisible: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds, self.divisible = seconds, divisible
        if not divisible:
            hook = self.weight.register_post_accumulate_grad_hook
            hook(lambda weight: ACCELERATOR.end())  # type: ignore[no-untyped-call]  # torch's own

    def forward(self, x: Tensor) -> Tensor:
        ACCELERATOR.begin(self.seconds)
        try:  # torch.utils.checkpoint leaves the last layer that it runs again by an exception
            y: Tensor
            if self.divisible:
                y = self._with_half(x) + self._with_half(self.weight)
            else:
                y = _Sleep.apply(x, self.weight, self.seconds)
        finally:
            ACCELERATOR.end()
        return y

    def _with_half(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, whose gradient takes half a backward; a custom function would keep both halves whole."""
        view = tensor.view_as(tensor)
        if view.requires_grad:
            view.register_hook(self._pass_half)  # type: ignore[no-untyped-call]  # torch's own
        return view

    def _pass_half(self, gradient: Tensor) -> None:
        ACCELERATOR.begin(self.seconds * BACKWARD / 2)
        ACCELERATOR.end()


@dataclass(frozen=True)
class Link:
    """Describes the time of a message, in seconds of the emulation.

    Attributes:
        carry: seconds that the message in front of each cell occupies the link, in either direction.
        latency: seconds from the end of sending to the arrival.
    """

    carry: Sequence[float]
    latency: float


class LinkTransport(Transport):
    """Delays the messages of another transport as long as `Link` requires."""

    blocks_device = False

    def __init__(self, link: Link, transport: Transport) -> None:
        self._link, self._transport = link, transport
        self._free: dict[tuple[str, int], float] = {}  # when each direction of each link will have sent its messages

    def send_spec(self, boundary: int, spec: BoundarySpec) -> None:
        self._transport.send_spec(boundary, spec)

    def receive_spec(self, boundary: int) -> BoundarySpec:
        return self._transport.receive_spec(boundary)

    def drain(self) -> None:
        self._transport.drain()

    def send(self, message: Message, tensors: Sequence[Tensor], spec: BoundarySpec) -> None:
        """Stamps the message with its time of arrival."""
        way = message.direction, message.boundary
        begins = max(time.perf_counter(), self._free.get(way, 0.0))
        self._free[way] = begins + self._link.carry[message.boundary + 1] * ACCELERATOR.speed
        arrives = self._free[way] + self._link.latency * ACCELERATOR.speed
        stamp = torch.tensor([arrives], dtype=torch.float64)
        self._transport.send(message, (*tensors, stamp), _stamped(spec))

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        """Returns a function that waits for the message, and then until it would have arrived."""
        wait = self._transport.post(message, _stamped(spec))

        def wait_for_arrival(separate: int) -> Tensors:
            *tensors, stamp = wait(separate + 1)
            time.sleep(max(0.0, float(stamp) - time.perf_counter()))
            return tuple(tensors)

        return wait_for_arrival


@lru_cache
def _stamped(spec: BoundarySpec) -> BoundarySpec:
    return replace(spec, tensors=(*spec.tensors, STAMP))


def join_emulation(context: Context, realtime: bool) -> StopWatch:
    """Makes this process one of the emulated workers, and returns the function that times their steps; all call it.

    Args:
        realtime: the process goes before the machine's other processes (Linux, as root).
    """
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    context.init_process_group()
    return StopWatch(context.rank, context.world_size, ACCELERATOR.reset)


def warm_up(steps: Iterable[Step], watch: StopWatch) -> None:
    """Runs each step once, without sleeping."""
    ACCELERATOR.speed = 0.0
    for step in steps:
        watch.time(step)
    ACCELERATOR.speed = 1.0


class Workload:
    """Holds a model of layers that sleep, on which every contender runs on this worker.

    Args:
        seconds: time of one micro-batch's forward in each layer.
        link: None: messages as fast as this machine has them.
    """

    def __init__(self, seconds: Sequence[float], M: int, rank: int, K: int, link: Link | None) -> None:
        self.micro_batches: list[MicroBatch] = [((x,), (x,)) for x in torch.zeros(EXAMPLES, WIDTH).tensor_split(M)]
        self.M, self.rank, self.K, self._seconds, self._link = M, rank, K, seconds, link

    def layers(self, part: range, divisible: bool = False) -> list[SleepingLayer]:
        """Makes some layers of the model; ``divisible``: as `SleepingLayer`."""
        return [SleepingLayer(self._seconds[i], divisible) for i in part]

    def transport(self, placement: tuple[int, ...]) -> Transport | None:
        """Connects this worker, given the worker of every cell."""
        transport = cpu_transport(placement)
        return transport if self._link is None or transport is None else LinkTransport(self._link, transport)
