"""Tests that replicas that share BatchNorm's statistics train as one model with larger micro-batches."""

from __future__ import annotations

from gpipe_cli.bench.workers import run_workers


def test_two_replicas_have_the_gradients_and_statistics_of_the_joined_mini_batch() -> None:
    assert run_workers("group_jobs:normalise", 2, {}) == []
