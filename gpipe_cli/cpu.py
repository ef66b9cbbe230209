"""Reports the cores and memory that a process may use; sets its threads, memory allocator and random generators."""

import ctypes
import os
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# gloo connects processes of one machine by the loopback interface: a laptop's own name may not resolve.
GLOO_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo"}

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
MEMORY_FACTS, PROCESSORS = Path("/proc/meminfo"), Path("/proc/cpuinfo")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = (1 << 31) - 1  # bytes, the most that mallopt takes


def usable_cores() -> int:
    """Returns the number of cores that this process may use: of its affinity, within its control groups' share."""
    return max(1, min([len(os.sched_getaffinity(0)), *_shares()]))


def processor_name() -> str:
    """Returns the processor's name."""
    lines = (line.partition(":") for line in _read(PROCESSORS).splitlines())
    return next((name.strip() for key, _, name in lines if key.startswith("model name")), platform.machine())


def compile_environment(workers: int) -> dict[str, str]:
    """Returns the environment variable that limits the processes with which each of a machine's workers compiles.

    torch.compile starts up to 32 for each worker by default. All workers together get about one for each core.
    """
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(32, usable_cores() // workers)))}


def _shares() -> Iterator[int]:
    """Yields the processor time, in whole cores, that each control group with a limit grants."""
    for group in _control_groups("cpu"):
        words = _read(group / "cpu.max").split()  # version 2: "quota period", or "max period"
        words = words or [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]  # version 1: or -1
        if words[0].isdigit():
            yield int(words[0]) // int(words[1])


def _control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those around it, up to the root (cgroups(7)).

    A container may see its group's path as from outside, where it has no folder. Its root is then that group.
    """
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # version 2, or version 1
            root = CGROUPS / controller if controllers else CGROUPS
            parts = path.strip("/").split("/")
            yield from (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _read(file: Path) -> str:
    """Returns a file's text, empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def usable_memory() -> int:
    """Returns the bytes of memory that this process may use, within its control groups' limits."""
    return _within_limits(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def free_memory() -> int:
    """Returns the free bytes of `usable_memory`, or all of them where the system does not report it."""
    lines = _read(MEMORY_FACTS).splitlines()
    available = (int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    return _within_limits(next(available, usable_memory()))


def _within_limits(memory: int) -> int:
    """Returns the bytes, at most the limit of each control group."""
    # Version 2; version 1, where a huge number is no limit.
    limits = [_read(group / name) for group in _control_groups("memory") for name in MEMORY_LIMITS]
    return min([memory, *(int(limit) for limit in limits if limit.isdigit())])


@contextmanager
def as_worker(threads: int | None) -> Iterator[None]:
    """Sets torch's number of threads within the context, as in a worker, and keeps freed memory from now on.

    None leaves the number of threads as it is.
    """
    keep_freed_memory()
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


def keep_freed_memory() -> None:
    """Keeps freed tensors' memory in the process for the next micro-batch.

    By default glibc returns it to the system and requests it again page by page: with the activations of M
    micro-batches alive, as in `gpipe`, that is thousands of page faults in every step (benchmarks/overhead.py).
    """
    for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(setting, _KEPT)


def return_freed_memory() -> None:
    """Returns to the system what `keep_freed_memory` keeps, for cells that come and go."""
    with suppress(AttributeError):  # a C library other than glibc keeps nothing
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the default generators of torch's CPU, numpy and Python, and restores them afterwards."""
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
