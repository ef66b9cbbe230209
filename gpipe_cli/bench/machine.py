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


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
