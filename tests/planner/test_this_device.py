"""Tests plans of the present machine; without a GPU here, its figures are given."""

from __future__ import annotations

import pytest

from gpipe_cli.planner.measure import this_device
from gpipe_cli.planner.measure.this_device import workers_per_gpu


@pytest.mark.parametrize(
    ("workers", "environment", "sharing"),
    [
        pytest.param(2, {}, 1, id="as many as GPUs"),
        pytest.param(3, {}, 2, id="one more"),
        pytest.param(6, {}, 3, id="three each"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1, id="two machines"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, id="one machine"),
        pytest.param(4, {"WORLD_SIZE": "4"}, 1, id="a launcher that may have given each its GPU"),
    ],
)
def test_only_workers_of_this_machine_share_its_two_gpus(
    workers: int, environment: dict[str, str], sharing: int
) -> None:
    assert workers_per_gpu(workers, 2, environment) == sharing


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_are_measured_between_two_processes(shared_memory: bool) -> None:
    found = this_device.link_between_processes(shared_memory)
    assert found is not None
    assert 0 < found.host < 0.1
    assert 0 <= found.latency < 0.1
    assert found.rate > 1e6
