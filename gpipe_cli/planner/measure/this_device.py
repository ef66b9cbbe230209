"""Describes the present machine as a `Device`: measures its rates, reads its memory."""

import math
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ...config import PipelineConfig, Settings
from ...cpu import as_worker, usable_memory
from ...factory.build import build_optimizer
from ...factory.groups import GroupKey, Groups
from ...gpus import GPU
from ...partition.fake_layers import TensorShape
from ...pipeline.gradients import scale_gradients, squared_norms
from ..options import Device

# Of a GPU's free memory the share that is lost between blocks, and the bytes of workspaces and communicators.
LOST, LIBRARIES = 0.05, 0.3e9
_SECONDS = 0.15  # of each measurement
_UPDATED, _AT_ONCE = 1 << 20, 8  # numbers, and parameters at most, of one timed update
_GPU_LINK: dict[str, Any] = {"link": 12e9, "latency": 1e-5, "host": 0.0}  # PCIe 3.0 ×16
# As measured on two cores.
_CPU_LINK: dict[str, Any] = {"link": 0.6e9, "between": 0.6e9, "latency": 1e-4, "host": 1.5e-4}


def present_device(pipeline: PipelineConfig) -> torch.device:
    """Returns the device on which a run on this machine would compute."""
    return torch.device(GPU if pipeline.device != "cpu" and torch.cuda.is_available() else "cpu")


def workers_on_a_gpu(pipeline: PipelineConfig, workers: int) -> int:
    """Returns how many workers share a GPU of this machine; 1 where each has its own, and on CPUs.

    Under torchrun the environment holds how many of a job's workers are on this machine. Another launcher may hide
    the GPUs of other workers from this process, so there each worker is assumed to have its own.

    Args:
        workers: number of workers of the job, of all replicas together.
    """
    if present_device(pipeline).type == "cpu":
        return 1
    gpus = torch.cuda.device_count()
    if "WORLD_SIZE" in os.environ:
        workers = min(workers, int(os.environ.get("LOCAL_WORLD_SIZE") or gpus))
    return math.ceil(workers / gpus)


def room_for_tensors(free: float, sharing: int) -> float:
    """Returns the bytes that a worker has for tensors on a GPU.

    Args:
        free: free bytes of the GPU.
        sharing: number of workers that share it.
    """
    return max(1.0, (1 - LOST) * free / sharing - LIBRARIES)


def free_memory_of_gpu(device: torch.device) -> float:
    """Returns the free bytes of a GPU; what this process's allocator holds without need is given back first."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return float(free)


def measure_device(pipeline: PipelineConfig) -> Device:
    """Measures the rates that one worker has on this machine, which takes seconds; returns them with its memory.

    A worker has its own threads and its part of the memory, or its part of a GPU's free memory. The cost of messages is
    assumed.
    """
    device, workers = present_device(pipeline), pipeline.planned_workers * pipeline.replicas
    sharing, is_gpu = workers_on_a_gpu(pipeline, workers), device.type == GPU
    memory = room_for_tensors(free_memory_of_gpu(device), sharing) if is_gpu else usable_memory() / workers
    side, numbers = (8192, 1 << 26) if is_gpu else (512, 1 << 23)
    with as_worker(pipeline.threads):
        a = torch.randn(side, side, device=device)
        b, half = torch.randn_like(a), a.bfloat16()
        vector, small = torch.zeros(numbers, device=device), torch.zeros(8, device=device)
        measured = Device(
            name=f"this machine, {torch.cuda.get_device_name(device) if is_gpu else 'CPU'}",
            flops=2 * side**3 / _seconds(lambda: torch.mm(a, b)) / sharing,
            half_flops=2 * side**3 / _seconds(lambda: torch.mm(half, half)) / sharing,
            memory=memory,
            bandwidth=8 * numbers / _seconds(lambda: vector.add_(1.0)) / sharing,
            **(_GPU_LINK if is_gpu and sharing == 1 and pipeline.backend != "gloo" else _CPU_LINK),
            overhead=_seconds(lambda: small.add_(1.0)),
            kernels="accelerator" if is_gpu else "cpu",
        )
    if is_gpu:  # other workers may share it with this one, which may go on to train
        del a, b, half, vector, small
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return measured


def update_seconds(settings: Settings) -> Callable[[str, TensorShape], float]:
    """Returns a function (full name, shape) that returns the seconds that a parameter's update takes on this machine.

    An update is the gradient's norm and clipping, the step of the run's own optimizer, and the moving average.
    Parameters of one kind are timed once, some together as in a run. Of a very large one a part is timed. Workers that
    share a GPU take turns.
    """
    groups, pipeline, device = Groups(settings.optimizer), settings.pipeline, present_device(settings.pipeline)
    sharing = workers_on_a_gpu(pipeline, pipeline.planned_workers * pipeline.replicas)

    @cache
    def seconds_of(key: GroupKey, shape: TensorShape) -> float:
        """Times parameters of one shape with the settings ``key``, about `_UPDATED` numbers; returns one's seconds."""
        numbers = max(1, shape.numel)
        rows, *others = shape.shape or (1,)
        sizes = [max(1, min(rows, rows * _UPDATED // numbers)), *others]  # some rows of a very large parameter
        together = max(1, min(_AT_ONCE, _UPDATED // numbers))
        weights = [nn.Parameter(torch.zeros(sizes, dtype=shape.dtype, device=device)) for _ in range(together)]
        averages = [weight.detach().clone() for weight in weights]
        optimizer = build_optimizer(settings.optimizer, {key: weights})
        for weight in weights:
            weight.grad = torch.ones_like(weight)

        def update() -> None:
            squared_norms(weights)
            scale_gradients(weights, 0.99)
            optimizer.step()
            if settings.trainer.average is not None:
                torch._foreach_lerp_(averages, tuple(weights), 0.02)

        with as_worker(pipeline.threads), torch.no_grad():
            seconds = _seconds(update, enough=_SECONDS / 10)
        # From one of those timed, which may be a part, to the whole parameter.
        return sharing * seconds / together * numbers / max(1, weights[0].numel())

    return lambda name, shape: seconds_of(groups.key(name, shape.shape), shape)


def _seconds(run: Callable[[], object], enough: float = _SECONDS) -> float:
    """Returns the median seconds of one call.

    Args:
        enough: seconds for which it is called again and again.
    """
    from torch.utils.benchmark import Timer  # here, because it brings setuptools and looks for CUDA's compiler

    timer = Timer("run()", timer=_now, globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=enough).median


def _now() -> float:
    """Returns the time in seconds when the GPU, if this process uses one, has done its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.synchronize()
    return time.perf_counter()
