"""Reports the cores and memory that a process may use, and sets its threads and its memory allocator."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# gloo connects processes of one machine by the loopback interface: a laptop's own name may not resolve.
GLOO_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_FACTS = Path("/proc/meminfo")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MALLOC_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"}
_KEPT = (1 << 31) - 1  # bytes, the most that mallopt takes


def usable_cores() -> int:
    """Returns the number of cores that this process may use: of its affinity, within its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _container_share()
    return cores if quota is None else min(cores, max(1, quota // period))


def _container_share() -> tuple[int | None, int]:
    """Returns the container's processor time in each period, None without a limit, and the period, in microseconds."""
    words: list[str] = []
    if (limit := CGROUPS / "cpu.max").is_file():  # version 2: "quota period", or "max period"
        words = limit.read_text().split()
    elif (older := CGROUPS / "cpu" / "cpu.cfs_quota_us").is_file():  # version 1; -1 is no limit
        words = [older.read_text(), older.with_name("cpu.cfs_period_us").read_text()]
    quota, period = words if len(words) == 2 else ("max", "1")
    return (int(quota), int(period)) if quota.strip().isdigit() else (None, 1)


def usable_memory() -> int | None:
    """Returns the bytes of memory that this process may use: the machine's or its container's; None if unknown."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return _within_container(machine)


def free_memory() -> int | None:
    """Returns the free bytes of `usable_memory` (Linux), or all of them where the system does not report it."""
    try:
        with MEMORY_FACTS.open(encoding="ascii") as lines:
            return _within_container(next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line))
    except (OSError, StopIteration):
        return usable_memory()


def _within_container(memory: int | None) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2; version 1: a huge number is no limit
        file = CGROUPS / name
        if file.is_file() and (limit := file.read_text().strip()).isdigit():
            return int(limit) if memory is None else min(memory, int(limit))
    return memory


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Sets torch's threads inside operations for the block, if torch is loaded; None leaves its own choice."""
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
    """Computes as a worker of a pipeline does: with this many threads, and keeping freed memory from now on."""
    keep_freed_memory()
    with torch_threads(threads):
        yield


def keep_freed_memory() -> None:
    """Keeps freed tensors' memory in the process for the next micro-batch, if the C library is glibc.

    By default glibc returns it to the system and requests it again page by page: with the activations of M
    micro-batches alive, as in `gpipe`, that is thousands of page faults in every step (benchmarks/overhead.py). The
    user's own settings of malloc in the environment are left alone.
    """
    if _MALLOC_SETTINGS & os.environ.keys() or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _KEPT)
