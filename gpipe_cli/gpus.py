"""Counts this machine's GPUs without torch, so that commands can do it before workers start."""

import os
import re
import shutil
import subprocess
from collections.abc import MutableMapping
from functools import cache
from itertools import takewhile
from pathlib import Path

GPU = "cuda"  # as torch names the kind of device
NVIDIA_SMI_SECONDS = 20.0
_NAMED = re.compile(r"(GPU|MIG)-.+")


def count_gpus() -> int:
    """Returns how many GPUs CUDA programs see: those of CUDA_VISIBLE_DEVICES that the driver has."""
    present, visible = _installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores what follows an invalid entry, as -1, or the NoDevFiles that Slurm gives to a job without GPUs.
    names = (name.strip() for name in visible.split(","))
    valid = takewhile(lambda name: int(name) < present if name.isdecimal() else _NAMED.fullmatch(name), names)
    return min(present, sum(1 for _ in valid))


def let_memory_grow(environment: MutableMapping[str, str]) -> None:
    """Lets torch extend a GPU's blocks of memory, because pieces of varying size leave gaps in fixed ones.

    It must be called before torch is imported.
    """
    if "PYTORCH_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@cache
def _installed_gpus() -> int:
    """Counts the GPUs that the driver has, by nvidia-smi or /proc."""
    if program := shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    folder = Path("/proc/driver/nvidia/gpus")
    # A container sees its machine's folder even if it was given none of the GPUs.
    return len(list(folder.iterdir())) if folder.is_dir() and Path("/dev/nvidiactl").exists() else 0
