"""Tests the measurement of messages between the workers of this machine."""

from __future__ import annotations

import pytest

from gpipe_cli.planner.measure.link import link_between_processes


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_it_is_measured_between_two_processes(shared_memory: bool) -> None:
    found = link_between_processes(shared_memory)
    assert found is not None
    assert 0 < found.host < 0.1
    assert 0 <= found.latency < 0.1
    assert found.rate > 1e6
