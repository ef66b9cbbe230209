"""Chooses the number of workers by the devices of this machine. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_cli.config import PipelineConfig
from gpipe_cli.cpu import usable_cores
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus


@dataclass(frozen=True)
class Devices:
    """Holds a number of devices and their kind, "GPU" or "core"."""

    number: int
    word: str

    def __str__(self) -> str:
        return plural(self.number, self.word)


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def find_devices(device: str) -> Devices:
    """Returns the machine's GPUs, or the CPU cores that this process may use (`pipeline.device`)."""
    gpus = 0 if device == "cpu" else count_gpus()
    return Devices(gpus, "GPU") if gpus else Devices(usable_cores(), "core")


def most_workers(pipeline: PipelineConfig) -> tuple[int, Devices]:
    """Returns the number of workers of one replica that fit this machine, at least one, and its devices."""
    devices = find_devices(pipeline.device)
    room = devices.number // pipeline.replicas // (pipeline.threads if devices.word == "core" else 1)
    return max(1, room), devices


def choose_workers(pipeline: PipelineConfig, inline: bool, world_size: int | None) -> tuple[int, str]:
    """Returns the number of workers of one replica, and a line about it for the console.

    Args:
        inline: one worker inside the command's process.
        world_size: of the torchrun job that started this process; None if the command starts its own workers.

    Raises:
        ConfigurationError: `world_size` does not fit the configuration, or the workers do not fit the schedule.
    """
    if world_size is not None:
        workers, why = _workers_of_job(pipeline, world_size), f"WORLD_SIZE={world_size}"
    elif inline:
        workers, why = 1, "launch.inline=true"
    elif pipeline.workers == "auto":
        room, devices = most_workers(pipeline)
        workers, why = pipeline.workers_in(room), str(devices)
    else:
        workers, why = pipeline.workers, f"pipeline.workers={pipeline.workers}"
    K = pipeline.K
    if pipeline.schedule == "interleaved_1f1b" and K % workers:
        raise ConfigurationError(
            f"pipeline.schedule=interleaved_1f1b gives each worker the same number of cells, but pipeline.K={K} is no "
            f"multiple of {plural(workers, 'worker')} ({why}): use pipeline.K={K + -K % workers}"
        )
    replicas = f" × {plural(pipeline.replicas, 'replica')}" if pipeline.replicas > 1 else ""
    return workers, f"{plural(pipeline.K, 'cell')} on {plural(workers, 'worker')}{replicas} ({why})"


def _workers_of_job(pipeline: PipelineConfig, world_size: int) -> int:
    replicas, K = pipeline.replicas, pipeline.K
    if pipeline.workers != "auto":
        wanted = pipeline.workers * replicas
        if wanted != world_size:
            raise ConfigurationError(
                f"pipeline.workers={pipeline.workers} × pipeline.replicas={replicas} needs {wanted} processes but "
                f"WORLD_SIZE={world_size}: start torchrun with {wanted} processes in all, or use pipeline.workers=auto"
            )
        return pipeline.workers
    workers, rest = divmod(world_size, replicas)
    if rest or not workers:
        raise ConfigurationError(
            f"pipeline.replicas={replicas} does not divide WORLD_SIZE={world_size}: start torchrun with a multiple of "
            f"{replicas} processes, or use another pipeline.replicas"
        )
    if workers > K:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} makes {plural(workers, 'worker')} per replica but pipeline.K={K}: "
            f"use pipeline.K>={workers}, or start torchrun with {K * replicas} processes in all"
        )
    return workers
