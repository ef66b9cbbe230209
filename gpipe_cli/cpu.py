"""How processes use a machine's CPU: cores, torch's threads, the memory that they keep, how gloo connects them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A laptop's own name may not resolve, and processes of one machine need no network.
GLOO_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MALLOC_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"}
_KEPT = (1 << 31) - 1  # bytes, the most that mallopt takes


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's share of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")  # "quota period" in microseconds, or "max period"
    words = limit.read_text().split() if limit.is_file() else []
    if len(words) == 2 and words[0].isdigit():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Use this many threads inside operations, if torch is loaded; None leaves torch's own choice."""
    if threads is None or "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def as_worker(threads: int | None) -> Iterator[None]:
    """Compute as a worker of a pipeline does: with so many threads, and keeping memory from now on."""
    keep_freed_memory()
    with torch_threads(threads):
        yield


def keep_freed_memory() -> None:
    """Freed tensors stay with the process for the next micro-batch, where the C library can do that (glibc).

    Otherwise it returns them to the system and asks again, page by page: with the activations of M micro-batches
    alive, as in `gpipe`, thousands of page faults in every step (benchmarks/overhead.py). A user's own settings of
    malloc in the environment are left alone.
    """
    if _MALLOC_SETTINGS & os.environ.keys() or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _KEPT)
