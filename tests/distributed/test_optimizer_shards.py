"""Tests that replicas divide the optimizer's state: even shares, and the bits of an optimizer that has everything."""

from __future__ import annotations

import pytest
from own_plan import OWN, planned

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.optimizer_shards import shares


def test_shares_are_even_and_the_same_everywhere() -> None:
    sizes = [100, 1, 60, 40, 40, 0, 59]
    owners = shares(sizes, 3)
    assert owners == shares(list(sizes), 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(3)]
    assert loads == [100, 100, 100]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_divided_updates_and_early_sums_have_the_bits_of_whole_ones(replicas: int) -> None:
    assert run_workers("group_jobs:shard", replicas, {}) == []


def test_a_plan_counts_the_largest_share() -> None:
    words = (*OWN, "pipeline.K=2", "pipeline.M=4", "pipeline.replicas=4", "optimizer=adam")
    whole, divided = planned(*words), planned(*words, "pipeline.shard_optimizer=true")
    assert divided.cells[0].optimizer == pytest.approx(whole.cells[0].optimizer / 4)
    assert divided.cells[0].gradients == whole.cells[0].gradients
    assert divided.memory < whole.memory
