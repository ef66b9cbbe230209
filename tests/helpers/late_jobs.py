"""Trains on the device without hardware (`late_device.py`): in this process, or as real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from inline_run import train_inline
from late_device import LATE, NAME, runs_on

from gpipe_cli.launch.context import Context
from gpipe_cli.launch.supervisor import Job, launch
from gpipe_cli.trainer.run import main


def work(context: Context, config: dict[str, Any]) -> Any:
    """Entry point of a worker on the device; each draws the order of its streams from a seed of its own."""
    with runs_on(LATE, NAME, seed=context.rank):
        return main(context, config)


def train_late(run_dir: Path, workers: int, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains with so many workers on the device; returns the summary and all events."""
    if workers == 1:
        with runs_on(LATE, NAME):
            return train_inline(run_dir, *words)
    events: list[dict[str, Any]] = []
    found: list[Any] = []

    def as_processes(job: Job, on_event: Any) -> Any:
        found.append(launch(Job(run_dir, workers, f"{__name__}:work", job.config), events.append))
        return found[0]

    with patch("inline_run.launch_inline", as_processes):
        summary, _ = train_inline(run_dir, *words, f"pipeline.workers={workers}", "launch.inline=false")
    return summary, events
