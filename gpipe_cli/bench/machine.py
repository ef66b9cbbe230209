"""Where figures were taken."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpipe_cli.cpu import usable_cores


def machine() -> dict[str, Any]:
    """The processor, its cores, the versions; the load tells whether others were at work there."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def machine_line() -> str:
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load']} at the start; "
        f"Python {facts['python']}, torch {facts['torch']}"
    )


def stolen() -> tuple[int, int] | None:
    """Ticks of all processors that a virtual machine was ready to use and its host gave to others, and ticks in all.

    Since the start of the system; None where that is not told.
    """
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    ticks = [int(number) for number in first[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return ticks[-1], sum(ticks)


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
