"""Trains inside the test's own process: quick, because torch is imported only once."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from composed import checked

from gpipe_cli.launch.supervisor import Job, launch_inline


def train_inline(
    run_dir: Path, *overrides: str, on_event: Callable[[dict[str, Any]], None] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains with one worker and these overrides; returns the summary and all events.

    Args:
        on_event: gets the events, instead of the list.
    """
    config = checked("launch.inline=true", "logging.tensorboard=false", *overrides).config
    run_dir.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = []
    job = Job(run_dir, 1, "gpipe_cli.trainer.run:main", {"settings": config, "started_at": time.monotonic()})
    return launch_inline(job, on_event or events.append), events


def same_bits_at_every_k(run_dir: Path, cells: Sequence[int], *overrides: str) -> bool:
    """Returns whether runs of one worker with so many cells each have equal losses and evaluations."""
    found = []
    for K in cells:
        words = ("pipeline.workers=1", "trainer.evaluate_first=false", f"pipeline.K={K}")
        summary, events = train_inline(run_dir / str(K), *overrides, *words)
        found.append([summary["evaluation"], [event["loss"] for event in events if "loss" in event]])
    return all(other == found[0] for other in found)
