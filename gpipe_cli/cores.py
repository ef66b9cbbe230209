"""How many cores there are for us."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's share of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")  # "quota period" in microseconds, or "max period"
    words = limit.read_text().split() if limit.is_file() else []
    if len(words) == 2 and words[0].isdigit():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores
