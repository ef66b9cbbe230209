"""Tests that replicas that share BatchNorm's statistics train as one model with larger micro-batches."""

from __future__ import annotations

from pathlib import Path

from gpipe_cli.launch.supervisor import Job, launch


def test_two_replicas_have_the_gradients_and_statistics_of_the_joined_mini_batch(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, "group_jobs:normalise", {}, preload=("torch", "torch.distributed"))
    found = launch(job, lambda event: None)
    assert not found, "\n".join(found)
