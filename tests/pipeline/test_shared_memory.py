"""Tests that workers of one machine send messages through memory that they share."""

from __future__ import annotations

import sys

import pytest

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.report import WorkerFailed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own() -> None:
    found = run_workers("group_jobs:send_both_ways", 2, {})
    assert len(found) == 40
    assert all(found)


def test_a_message_out_of_order_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 sent message \d+ where \d+ is awaited"):
        run_workers("group_jobs:send_in_a_wrong_order", 2, {})


def test_the_end_of_a_worker_ends_its_peer_and_is_reported_as_the_cause() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGKILL") as failure:
        run_workers("group_jobs:kill_beside_receive", 2, {})
    assert "Connection closed" not in str(failure.value)
