"""How many workers the machine has room for. Counts GPUs without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.config import PipelineConfig
from gpipe_cli.cpu import usable_cores
from gpipe_cli.errors import ConfigurationError

NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Devices:
    """`number` devices; `word` says of what: "GPU" or "core"."""

    number: int
    word: str

    def __str__(self) -> str:
        return plural(self.number, self.word)


def plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def find_devices(device: str) -> Devices:
    """The devices of this machine: its GPUs, or the CPU cores that this process may use (`pipeline.device`)."""
    gpus = 0 if device == "cpu" else count_gpus()
    return Devices(gpus, "GPU") if gpus else Devices(usable_cores(), "core")


def count_gpus() -> int:
    """GPUs that CUDA programs see: CUDA_VISIBLE_DEVICES, as far as the driver has them."""
    present = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    used = names.index("-1") if "-1" in names else len(names)  # what stands behind an invalid one is not visible
    return min(present, len([name for name in names[:used] if name]))


def _installed_gpus() -> int:
    if program := shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def room_for_workers(pipeline: PipelineConfig) -> tuple[int, Devices]:
    """How many workers of one replica this machine has devices for, at least one; and its devices."""
    devices = find_devices(pipeline.device)
    room = devices.number // pipeline.replicas // (pipeline.threads if devices.word == "core" else 1)
    return max(1, room), devices


def settle_workers(pipeline: PipelineConfig, inline: bool, world_size: int | None) -> tuple[int, str]:
    """The number of workers of one replica, and the line that tells the user.

    Args:
        inline: one worker inside the command's process.
        world_size: of the job that this process was started in (torchrun), None if the command starts its own workers.

    Raises:
        ConfigurationError: `world_size` is not what the configuration needs, or the workers not what the schedule does.
    """
    if world_size is not None:
        workers, why = _workers_of_job(pipeline, world_size), f"WORLD_SIZE={world_size}"
    elif inline:
        workers, why = 1, "launch.inline=true"
    elif pipeline.workers == "auto":
        room, devices = room_for_workers(pipeline)
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
