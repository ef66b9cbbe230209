"""Tests that the bits of a sum over replicas do not depend on a number's place in the tensor."""

from __future__ import annotations

import pytest

from gpipe_cli.bench.workers import run_workers


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_are_added_up_in_their_order(replicas: int) -> None:
    assert run_workers("replicas_jobs:sums", replicas, {}) == []
