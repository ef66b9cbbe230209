"""The present machine as a `Device`: its rates from a short measurement, its memory as it stands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from ..config import PipelineConfig
from ..cpu import as_worker
from .devices import Device
from .link import LinkTimes, link_between_processes

_SECONDS = 0.15  # of each measurement
_GPU_LINK = LinkTimes(host=0.0, latency=1e-5, rate=12e9)  # to a neighbour, assumed: PCIe 3.0 ×16
_CPU_LINK = LinkTimes(host=1.5e-4, latency=1e-4, rate=0.6e9)  # where it cannot be measured; as found on two cores


def present_device(pipeline: PipelineConfig) -> torch.device:
    """Where a run on this machine would compute."""
    return torch.device("cuda" if pipeline.device != "cpu" and torch.cuda.is_available() else "cpu")


def measure_device(pipeline: PipelineConfig) -> Device:
    """Rates of products and of memory, what starting an operation costs, and what messages between workers cost.

    With the threads that a worker has. A link between GPUs is assumed, not measured.
    """
    rates, workers = measure_rates(pipeline), pipeline.planned_workers * pipeline.replicas
    if present_device(pipeline).type == "cuda":
        return rates
    link = (link_between_processes() if workers > 1 else None) or _CPU_LINK
    return replace(rates, memory=rates.memory / workers, link=link.rate, latency=link.latency, host=link.host)


def measure_rates(pipeline: PipelineConfig) -> Device:
    """Likewise, without what messages cost, and with the machine's whole memory: that takes less than a second."""
    device = present_device(pipeline)
    if device.type == "cuda":
        return _measure(device, float(torch.cuda.get_device_properties(0).total_memory), _GPU_LINK)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with as_worker(pipeline.threads):
        return _measure(device, float(memory), _CPU_LINK)


def _measure(device: torch.device, memory: float, link: LinkTimes) -> Device:
    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu else 512
    numbers = (1 << 28) if is_gpu else (1 << 23)
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
        overhead=_seconds(lambda: small.add_(1.0), is_gpu),
        kernels="accelerator" if is_gpu else "cpu",
    )


def _seconds(run: Callable[[], object], is_gpu: bool) -> float:
    """The median time of one call."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        if is_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)
