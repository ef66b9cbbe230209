"""Tests that workers of one machine send messages through memory that they share."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.report import WorkerFailed, suspicion
from gpipe_cli.pipeline.messages.shared_memory import _lost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns what the jobs of shared_memory_jobs.py find that end well, run by the same two workers."""
    result: dict[str, Any] = run_workers("shared_memory_jobs:all_that_end_well", 2, {})
    return result


def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own(found: dict[str, Any]) -> None:
    assert len(found["both_ways"]) == 40
    assert all(found["both_ways"])


def test_a_full_window_waits_until_the_oldest_message_is_taken(found: dict[str, Any]) -> None:
    moments = found["full_window"]
    assert moments["full"] < moments["taken"] < moments["sent one more"]


def test_a_message_out_of_order_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 sent message \d+ where \d+ is awaited"):
        run_workers("shared_memory_jobs:wrong_order", 2, {})


def test_the_launcher_recognises_the_consequence_of_a_peers_end() -> None:
    for error in (None, ConnectionResetError(), BlockingIOError()):
        assert suspicion(_lost(1, error)) == 2


def test_the_end_of_a_worker_ends_its_peer_and_is_reported_as_the_cause() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGKILL") as failure:
        run_workers("shared_memory_jobs:kill_beside_receive", 2, {})
    assert "Connection closed" not in str(failure.value)


def test_a_worker_that_hangs_is_given_up(found: dict[str, Any]) -> None:
    assert found["hang"] == "process group, shared memory: rank 1 neither sends nor takes a message any more"
