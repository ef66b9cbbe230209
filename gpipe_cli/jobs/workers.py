"""Chooses the number of workers by the devices of this machine. No torch."""

from __future__ import annotations

from gpipe_cli.config import PipelineConfig
from gpipe_cli.cpu import usable_cores
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def most_workers(pipeline: PipelineConfig) -> tuple[int, str]:
    """Returns the number of workers of one replica that fit this machine, at least one, and its devices in words.

    The devices are GPUs, or the CPU cores that this process may use (`pipeline.device`).
    """
    if gpus := 0 if pipeline.device == "cpu" else count_gpus():
        return max(1, gpus // pipeline.replicas), plural(gpus, "GPU")
    cores = usable_cores()
    return max(1, cores // pipeline.replicas // pipeline.threads), plural(cores, "core")


def choose_workers(pipeline: PipelineConfig, inline: bool, world_size: int | None) -> tuple[int, str]:
    """Returns the number of workers of one replica, and a line about it for the console.

    Args:
        inline: one worker inside the command's process.
        world_size: of the torchrun job that started this process; None if the command starts its own workers.

    Raises:
        ConfigurationError: `world_size` does not fit the configuration.
    """
    if world_size is not None:
        workers, why = _workers_of_job(pipeline, world_size), f"WORLD_SIZE={world_size}"
    elif inline:
        workers, why = 1, "launch.inline=true"
    elif pipeline.workers == "auto":
        room, devices = most_workers(pipeline)
        workers, why = pipeline.workers_in(room), devices
    else:
        workers, why = pipeline.workers, f"pipeline.workers={pipeline.workers}"
    replicas = f" × {plural(pipeline.replicas, 'replica')}" if pipeline.replicas > 1 else ""
    cells = "cells to be chosen" if "K" in pipeline.auto else plural(pipeline.K, "cell")
    return workers, f"{cells} on {plural(workers, 'worker')}{replicas} ({why})"


def _workers_of_job(pipeline: PipelineConfig, world_size: int) -> int:
    replicas, K = pipeline.replicas, pipeline.K
    workers, rest = divmod(world_size, replicas)
    uneven = pipeline.schedule == "interleaved_1f1b" and workers and K % workers
    if rest or not 1 <= workers <= K or pipeline.workers not in ("auto", workers) or uneven:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} does not fit pipeline.workers={pipeline.workers} × pipeline.replicas={replicas} "
            f"and pipeline.K={K}: start torchrun with pipeline.replicas times 1 to {K} processes"
            + (", a number that divides pipeline.K (interleaved_1f1b)" if uneven else "")
        )
    return workers
