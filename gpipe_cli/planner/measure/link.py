"""Measures what a message between two workers costs, with the transport that the engine uses."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import ConfigurationError
from ...launch.context import Context
from ...launch.report import WorkerFailed
from ...launch.supervisor import Job, launch
from ...pipeline.messages.boundary import BoundarySpec, TensorSpec
from ...pipeline.messages.transport import Transport, connect_workers
from ...schedule.instruction import Message

MESSAGES = 20  # of each kind
_PAUSE = 0.002  # seconds before each: a worker that has just computed sends with a cold cache
_LARGE = 1 << 20  # numbers of a message whose time is its bytes'
_PATIENCE = 60.0  # seconds without a sign of life
_CPU = torch.device("cpu")


class LinkTimes(NamedTuple):
    """Describes the connection between two workers, in seconds and bytes per second.

    Attributes:
        host: seconds for which a send or a receive keeps its own worker from computing (mean of both).
        latency: seconds from the end of the sender's call until the receiver has a small message.
        rate: bytes per second of a large one.
    """

    host: float
    latency: float
    rate: float


def link_between_processes(shared_memory: bool = True) -> LinkTimes | None:
    """Measures between two new processes of this machine; returns None where they cannot be connected.

    Args:
        shared_memory: as gpipe-train's own workers send; otherwise over gloo.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-link-") as directory:
        entry, config = f"{__name__}:main", {"shared_memory": shared_memory}
        job = Job(Path(directory), 2, entry, config, preload=(__name__,), stall_seconds=_PATIENCE)
        try:
            return LinkTimes(*launch(job, lambda event: None))
        except (WorkerFailed, ConfigurationError):
            return None


def measure_link(
    transport: Transport, rank: int, device: torch.device = _CPU, control: dist.ProcessGroup | None = None
) -> LinkTimes:
    """Measures messages from worker 0 to worker 1; all workers of the process group call it and get the same result.

    Args:
        device: of the tensors that are sent.
        control: a CPU group of all workers; None: the default group is one.
    """
    for _ in range(2):  # the first time warms up
        sending, receiving, arrival = _messages(transport, rank, 1, device, control)
        whole = _messages(transport, rank, _LARGE, device, control)[2]
    times = torch.tensor([sending, receiving, arrival, whole], dtype=torch.float64)
    dist.all_reduce(times, group=control)  # each was measured by one worker, the others add 0
    sending, receiving, arrival, whole = times.tolist()
    latency = max(0.0, arrival - sending)
    return LinkTimes((sending + receiving) / 2, latency, 8 * _LARGE / max(whole - arrival, 1e-9))


def _messages(
    transport: Transport, rank: int, numbers: int, device: torch.device, control: dist.ProcessGroup | None
) -> tuple[float, float, float]:
    """Returns the median seconds of a send, of a receive whose message is there, and from a send's start to arrival."""
    # As in the engine: activations, followed by the targets of the micro-batch.
    spec = BoundarySpec((TensorSpec((numbers,), torch.float64, False), TensorSpec((8,), torch.int64, False)))
    content = torch.zeros(numbers, dtype=torch.float64, device=device)
    targets = torch.zeros(8, dtype=torch.int64, device=device)
    sending: list[float] = []
    receiving: list[float] = []
    arrival: list[float] = []
    for number in range(2 * MESSAGES):
        awaited = number % 2 == 0  # otherwise the message arrives before the receiver waits for it
        dist.barrier(group=control)  # nothing else is on its way
        if rank == 0:
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            content[0] = begin
            transport.send(Message("activation", 0, number), (content, targets), spec)
            sending.append(time.perf_counter() - begin)
        elif rank == 1:
            begin = time.perf_counter()
            wait = transport.post(Message("activation", 0, number), spec)
            posted = time.perf_counter()
            if not awaited:
                time.sleep(2 * _PAUSE)  # so long that a small message is there
            asked = time.perf_counter()
            message, _ = wait(0)
            end = time.perf_counter()
            if awaited:
                arrival.append(end - float(message[0]))
            else:
                receiving.append(posted - begin + end - asked)
    transport.drain()
    return _typical(sending), _typical(receiving), _typical(arrival)


def _typical(seconds: list[float]) -> float:
    """Returns the median; 0 on a worker that measured nothing of the kind."""
    return median(seconds) if seconds else 0.0


def main(context: Context, config: dict[str, Any]) -> LinkTimes:
    """Runs one of the two processes."""
    context.init_process_group(None if config["shared_memory"] else "gloo")
    world = dist.group.WORLD
    assert world is not None
    return measure_link(connect_workers((0, 1), _CPU, _CPU, (world, world), world), context.rank)
