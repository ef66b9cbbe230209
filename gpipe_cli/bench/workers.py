"""Starts worker processes for a measurement, and describes the machine they run on. Imports no torch."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpipe_cli.cpu import usable_cores
from gpipe_cli.launch.supervisor import Job, launch

PRELOAD = ("torch", "torch.distributed")


def run_workers(entry: str, workers: int, config: Mapping[str, Any], preload: Sequence[str] = ()) -> Any:
    """Runs ``entry(context, config)`` on so many processes with one thread each; returns rank 0's result.

    Raises:
        WorkerFailed, ConfigurationError: a worker raised an exception (WorkerOutOfMemory: memory ran out).
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as directory:
        job = Job(Path(directory), workers, entry, dict(config), preload=(*PRELOAD, *preload))
        return launch(job, lambda event: None)


def machine() -> dict[str, Any]:
    """Returns the processor, its cores, the load and the versions of Python and torch."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def machine_line() -> str:
    """Returns `machine` as one line of text."""
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load']} at the start; "
        f"Python {facts['python']}, torch {facts['torch']}"
    )


def processor() -> str:
    """Returns the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
