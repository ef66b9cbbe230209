"""How processes use a machine's CPU: cores, memory, torch's threads, how gloo connects them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A laptop's own name may not resolve, and processes of one machine need no network.
GLOO_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_FACTS = Path("/proc/meminfo")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MALLOC_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"}
_KEPT = (1 << 31) - 1  # bytes, the most that mallopt takes


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's share of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _container_share()
    return cores if quota is None else min(cores, max(1, quota // period))


def _container_share() -> tuple[int | None, int]:
    """Microseconds of processor time, None without a limit, in a period of so many."""
    words: list[str] = []
    if (limit := CGROUPS / "cpu.max").is_file():  # version 2: "quota period", or "max period"
        words = limit.read_text().split()
    elif (older := CGROUPS / "cpu" / "cpu.cfs_quota_us").is_file():  # version 1; -1 is no limit
        words = [older.read_text(), older.with_name("cpu.cfs_period_us").read_text()]
    quota, period = words if len(words) == 2 else ("max", "1")
    return (int(quota), int(period)) if quota.strip().isdigit() else (None, 1)


def usable_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or a container's share; None where nobody says."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return _within_container(machine)


def free_memory() -> int | None:
    """Bytes of it that are free, as far as the system tells (Linux); else all of it."""
    try:
        with MEMORY_FACTS.open(encoding="ascii") as lines:
            return _within_container(next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line))
    except (OSError, StopIteration):
        return usable_memory()


def _within_container(memory: int | None) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2; 1, where no limit is a very large one
        file = CGROUPS / name
        if file.is_file() and (limit := file.read_text().strip()).isdigit():
            return int(limit) if memory is None else min(memory, int(limit))
    return memory


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
