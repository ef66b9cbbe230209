"""Describes the present machine as a `Device`: measures its rates, its messages between workers, reads its memory."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...config import PipelineConfig
from ...cpu import as_worker, usable_memory, waited_for_core
from ...errors import ConfigurationError
from ...gpus import GPU
from ...launch.context import Context
from ...launch.report import WorkerFailed
from ...launch.supervisor import Job, launch
from ...pipeline.messages.boundary import BoundarySpec, TensorSpec
from ...pipeline.messages.transport import Transport, connect_workers
from ...schedule.instruction import Message
from ..devices import Device

_SECONDS = 0.15  # of each measurement
_QUEUED = 100  # operations started before the GPU is waited for: fewer than the driver's queue holds
_MESSAGES = 20  # of each kind
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


_GPU_LINK = LinkTimes(host=0.0, latency=1e-5, rate=12e9)  # assumed where there is one GPU only: PCIe 3.0 ×16
_COPIED = 1 << 26  # bytes from GPU to GPU
# Assumed where it cannot be measured; as measured on two cores.
_CPU_LINK = LinkTimes(host=1.5e-4, latency=1e-4, rate=0.6e9)


def present_device(pipeline: PipelineConfig) -> torch.device:
    """Returns the device on which a run on this machine would compute."""
    return torch.device(GPU if pipeline.device != "cpu" and torch.cuda.is_available() else "cpu")


def workers_on_a_gpu(pipeline: PipelineConfig) -> int:
    """Returns how many workers share a GPU of this machine; 1 where each has its own, and on CPUs."""
    if present_device(pipeline).type == "cpu":
        return 1
    return workers_per_gpu(pipeline.planned_workers * pipeline.replicas, torch.cuda.device_count(), os.environ)


def workers_per_gpu(workers: int, gpus: int, environment: Mapping[str, str]) -> int:
    """Returns how many workers share a GPU, for a job of so many workers on a machine with so many GPUs.

    Under torchrun the environment holds how many of a job's workers are on this machine. Another launcher may hide
    the GPUs of other workers from this process, so there each worker is assumed to have its own.
    """
    if "WORLD_SIZE" in environment:
        workers = min(workers, int(environment.get("LOCAL_WORLD_SIZE") or gpus))
    return math.ceil(workers / gpus)


def measure_device(pipeline: PipelineConfig) -> Device:
    """Returns rates, memory and the cost of operations and messages, as one worker has them.

    A worker has its threads, or its part of a GPU.
    """
    rates, workers = measure_rates(pipeline), pipeline.planned_workers * pipeline.replicas
    if rates.kernels == "accelerator":
        sharing = workers_on_a_gpu(pipeline)
        shared = ("flops", "half_flops", "bandwidth", "memory")
        rates = replace(rates, **{name: getattr(rates, name) / sharing for name in shared})
        if sharing == 1 and pipeline.backend != "gloo":
            return rates
    else:
        rates = replace(rates, memory=rates.memory / workers)
    link = (link_between_processes(pipeline.backend != "gloo") if workers > 1 else None) or _CPU_LINK
    return replace(rates, link=link.rate, latency=link.latency, host=link.host)


def measure_rates(pipeline: PipelineConfig) -> Device:
    """Returns the rates and the whole memory of the machine, or what is free on a GPU; takes less than a second.

    The cost of messages is assumed, but for the rate between two GPUs.
    """
    device = present_device(pipeline)
    if device.type == GPU:
        torch.cuda.empty_cache()  # memory that this process no longer needs counts as free
        return _measure(device, float(torch.cuda.mem_get_info()[0]), _link_between_gpus())
    memory = usable_memory()
    with as_worker(pipeline.threads):
        return _measure(device, math.inf if memory is None else float(memory), _CPU_LINK)


def _link_between_gpus() -> LinkTimes:
    """Times a copy from one GPU of this machine to another."""
    if torch.cuda.device_count() < 2:
        return _GPU_LINK
    given, taken = (torch.zeros(_COPIED, dtype=torch.uint8, device=torch.device(GPU, index)) for index in (0, 1))
    return _GPU_LINK._replace(rate=_COPIED / _seconds(lambda: taken.copy_(given), True))


def _measure(device: torch.device, memory: float, link: LinkTimes) -> Device:
    is_gpu = device.type == GPU
    side, numbers = (8192, 1 << 28) if is_gpu else (512, 1 << 23)
    while is_gpu and 16 * side**2 + 4 * numbers > memory / 2:  # matrices and vector
        side, numbers = side // 2, numbers // 4
    a = torch.randn(side, side, device=device)
    b, half = torch.randn_like(a), a.bfloat16()
    vector, small = torch.zeros(numbers, device=device), torch.zeros(8, device=device)
    return Device(
        name=f"this machine, {torch.cuda.get_device_name(device) if is_gpu else 'CPU'}",
        flops=2 * side**3 / _seconds(lambda: torch.mm(a, b), is_gpu),
        half_flops=2 * side**3 / _seconds(lambda: torch.mm(half, half), is_gpu),
        memory=memory,
        bandwidth=8 * numbers / _seconds(lambda: vector.add_(1.0), is_gpu),
        link=link.rate,
        latency=link.latency,
        host=link.host,
        overhead=_seconds(lambda: small.add_(1.0), is_gpu, _QUEUED if is_gpu else 1),
        kernels="accelerator" if is_gpu else "cpu",
    )


def _seconds(run: Callable[[], object], is_gpu: bool, calls: int = 1) -> float:
    """Returns the median seconds of one call, without those in which other processes had the core.

    Args:
        calls: number of calls timed together. On a GPU several: waiting for it takes longer than starting a small
            operation, and a run waits rarely.
    """
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        if is_gpu:
            torch.cuda.synchronize()
        waited, start = waited_for_core(), time.perf_counter()
        for _ in range(calls):
            run()
        if is_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if not is_gpu:  # which goes on while this process waits
            seconds = max(0.0, seconds - (waited_for_core() - waited))
        times.append(seconds / calls)
    return median(times)


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


def _measure_link(transport: Transport, rank: int) -> LinkTimes:
    """Measures messages from worker 0 to worker 1; both call it and get the same result."""
    for _ in range(2):  # the first time warms up
        sending, receiving, arrival = _messages(transport, rank, 1)
        whole = _messages(transport, rank, _LARGE)[2]
    times = torch.tensor([sending, receiving, arrival, whole], dtype=torch.float64)
    dist.all_reduce(times)  # each was measured by one worker, the others add 0
    sending, receiving, arrival, whole = times.tolist()
    latency = max(0.0, arrival - sending)
    return LinkTimes((sending + receiving) / 2, latency, 8 * _LARGE / max(whole - arrival, 1e-9))


def _messages(transport: Transport, rank: int, numbers: int) -> tuple[float, float, float]:
    """Returns the median seconds of a send, of a receive whose message is there, and from a send's start to arrival."""
    # As in the engine: activations, followed by the targets of the micro-batch.
    spec = BoundarySpec((TensorSpec((numbers,), torch.float64, False), TensorSpec((8,), torch.int64, False)))
    content = torch.zeros(numbers, dtype=torch.float64)
    targets = torch.zeros(8, dtype=torch.int64)
    sending: list[float] = []
    receiving: list[float] = []
    arrival: list[float] = []
    for number in range(2 * _MESSAGES):
        awaited = number % 2 == 0  # otherwise the message arrives before the receiver waits for it
        dist.barrier()  # nothing else is on its way
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
    # 0 on a worker that measured nothing of the kind
    return median(sending or [0.0]), median(receiving or [0.0]), median(arrival or [0.0])


def main(context: Context, config: dict[str, Any]) -> LinkTimes:
    """Runs one of the two processes."""
    context.init_process_group(None if config["shared_memory"] else "gloo")
    world = dist.group.WORLD
    assert world is not None
    return _measure_link(connect_workers((0, 1), _CPU, _CPU, (world, world), world), context.rank)
