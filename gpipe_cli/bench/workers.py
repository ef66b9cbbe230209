"""Worker processes for a measurement, without a run directory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.launch.supervisor import Job, launch

PRELOAD = ("torch", "torch.distributed")


def run_workers(entry: str, workers: int, config: Mapping[str, Any], preload: Sequence[str] = ()) -> Any:
    """Runs ``entry(context, config)`` on so many processes with one thread each; returns rank 0's result.

    Raises:
        WorkerFailed, ConfigurationError: a worker's exception (WorkerOutOfMemory: it had no room for a tensor).
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as directory:
        job = Job(Path(directory), workers, entry, dict(config), preload=(*PRELOAD, *preload))
        return launch(job, lambda event: None)
