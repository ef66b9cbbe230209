"""What a message between two workers costs, measured with the transport that the engine uses."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.boundary import BoundarySpec, TensorSpec
from gpipe_cli.pipeline.transport import ACTIVATION, Transport

MESSAGES = 20  # of each kind
_PAUSE = 0.002  # seconds before each: a worker that has just computed sends with a cold cache
_LARGE = 1 << 20  # numbers of a message whose time is its bytes'


class LinkTimes(NamedTuple):
    """Seconds, and bytes per second.

    Attributes:
        host: what a send or a receive keeps its own worker from computing (mean of both).
        latency: from the end of the sender's call to the moment at which the receiver has a small message.
        rate: bytes per second of a large one.
    """

    host: float
    latency: float
    rate: float


def measure_link(transport: Transport, rank: int) -> LinkTimes:
    """Worker 0 sends to worker 1; every worker of the process group calls this and gets the same answer."""
    sending, receiving, latency = _messages(transport, rank, 1)
    whole = _messages(transport, rank, _LARGE)[2]
    times = torch.tensor([sending, receiving, latency, whole], dtype=torch.float64)
    dist.all_reduce(times)  # each was found by one worker, the others add 0
    sending, receiving, arrival, whole = times.tolist()
    latency = max(0.0, arrival - sending)
    return LinkTimes((sending + receiving) / 2, latency, 8 * _LARGE / max(whole - arrival, 1e-9))


def _messages(transport: Transport, rank: int, numbers: int) -> tuple[float, float, float]:
    """Median seconds of a send's call, of a receive's when its message is there, and from a send's begin to arrival."""
    # As the engine's: activations, and the micro-batch's targets behind them.
    spec = BoundarySpec((TensorSpec((numbers,), torch.float64, False), TensorSpec((8,), torch.int64, False)))
    content, targets = torch.zeros(numbers, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    sending: list[float] = []
    receiving: list[float] = []
    arrival: list[float] = []
    for number in range(2 * MESSAGES):
        awaited = number % 2 == 0  # else it is there before it is asked for
        if rank == 0:
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            content[0] = begin
            transport.send(ACTIVATION, (content, targets), spec, 1, 1, number)
            sending.append(time.perf_counter() - begin)
        elif rank == 1:
            begin = time.perf_counter()
            pending = transport.post(ACTIVATION, spec, 0, 1, number)
            posted = time.perf_counter()
            if not awaited:
                time.sleep(1.5 * _PAUSE)  # so long that this message is there, and the next is not sent
            asked = time.perf_counter()
            message, _ = transport.finish(pending)
            end = time.perf_counter()
            if awaited:
                arrival.append(end - float(message[0]))
            else:
                receiving.append(posted - begin + end - asked)
    transport.drain()
    return _typical(sending), _typical(receiving), _typical(arrival)


def _typical(seconds: list[float]) -> float:
    """Their median; 0 on a worker that did nothing of the kind."""
    return median(seconds) if seconds else 0.0
