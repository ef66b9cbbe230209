"""Tests that workers of one machine send messages through memory that they share."""

from __future__ import annotations

import sys

import pytest

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.report import WorkerFailed, suspicion
from gpipe_cli.pipeline.messages.shared_memory import _lost, slot_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own() -> None:
    same = run_workers("shared_memory_jobs:both_ways", 2, {})
    assert len(same) == 40
    assert all(same)


def test_there_are_as_many_slots_as_messages_were_on_their_way() -> None:
    slot = slot_bytes(4000)
    assert run_workers("shared_memory_jobs:slots", 2, {}) == [3 * slot] * 6


def test_slots_are_whole_pages() -> None:
    assert [slot_bytes(size) % 4096 for size in (1, 4096, 4097)] == [0, 0, 0]
    assert slot_bytes(4097) == 2 * slot_bytes(4096)


def test_a_full_window_waits_until_the_oldest_message_is_taken() -> None:
    moments = run_workers("shared_memory_jobs:full_window", 2, {})
    assert moments["full"] < moments["taken"] < moments["sent one more"]


@pytest.mark.parametrize("entry", ["far_apart", "old_python", "no_sockets", "not_wanted"])
def test_the_process_group_carries_messages_where_no_memory_is_shared(entry: str) -> None:
    assert run_workers(f"shared_memory_jobs:{entry}", 2, {}) == [0, True]


def test_a_message_out_of_order_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 sent message \d+ where \d+ is awaited"):
        run_workers("shared_memory_jobs:wrong_order", 2, {})


def test_a_message_arrives_after_the_end_of_its_sender() -> None:
    assert run_workers("shared_memory_jobs:last_message", 2, {})


def test_too_many_open_files_are_named_and_not_taken_for_the_end_of_the_peer() -> None:
    said = run_workers("shared_memory_jobs:no_descriptors", 2, {})
    assert said == "no memory can be shared with rank 0: too many open files (ulimit -n)"


def test_the_launcher_recognises_the_consequence_of_a_peers_end() -> None:
    for error in (None, ConnectionResetError(), BlockingIOError()):
        assert suspicion(_lost(1, error)) == 2


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ("fail_beside_receive", "ValueError: the real cause"),
        ("kill_beside_receive", "worker 1 was killed by SIGKILL"),
        ("kill_beside_send", "worker 1 was killed by SIGKILL"),
    ],
)
def test_the_end_of_a_worker_ends_its_peer_and_is_reported_as_the_cause(entry: str, cause: str) -> None:
    with pytest.raises(WorkerFailed) as failure:
        run_workers(f"shared_memory_jobs:{entry}", 2, {})
    assert cause in str(failure.value)
    assert "Connection closed" not in str(failure.value)


def test_a_worker_that_hangs_is_given_up() -> None:
    said = run_workers("shared_memory_jobs:hang", 2, {})
    assert said == "process group, shared memory: rank 1 neither sends nor takes a message any more"
