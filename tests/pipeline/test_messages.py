"""Tests that messages between workers arrive as they were sent, through shared memory and over gloo."""

from __future__ import annotations

import pytest

from gpipe_cli.bench.workers import run_workers


@pytest.mark.parametrize("wire", ["shared memory", "gloo"])
def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own(wire: str) -> None:
    found = run_workers("group_jobs:send_both_ways", 2, {"wire": wire})
    assert len(found) == 102
    assert all(found)
