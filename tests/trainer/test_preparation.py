"""Tests that workers wait for data that take long to prepare, and that a signal or a failure ends all of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_command import Command

from gpipe_cli.commands.plan import make_request
from gpipe_cli.data.source import Report
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import PlainError
from gpipe_cli.metrics.journal import Notices
from gpipe_cli.trainer.batches import open_source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over processes in /proc")

LONGER_THAN_A_MESSAGE_MAY = 3.0
FOR_EVER = 120.0


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Any]:
    """Starts `prepare(workers, seconds)`."""
    started: list[Command] = []

    def start(workers: int, seconds: float, prefix: tuple[str, ...] = ()) -> Command:
        options = (f"config={json.dumps({'seconds': seconds})}", 'preload=["torch"]', "grace_seconds=2.0")
        started.append(Command(tmp_path, "prepare_data", str(workers), str(tmp_path), *options, prefix=prefix))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


@pytest.mark.slow
def test_replicas_prepare_in_turn_and_no_message_times_out(prepare: Any) -> None:
    job = prepare(4, LONGER_THAN_A_MESSAGE_MAY)
    *_, result = job.events()
    code, errors = job.end()
    assert code == 0, errors
    first, _, second, _ = result["value"]
    assert result["value"] == [first, 0, second, 0]
    assert second >= first + LONGER_THAN_A_MESSAGE_MAY


def test_a_worker_that_dies_preparing_leaves_no_other_waiting(prepare: Any) -> None:
    job = prepare(2, FOR_EVER)
    job.wait_until_ready(1)
    os.kill(job.ready[0]["pid"], signal.SIGKILL)
    code, errors = job.end()
    assert code == 1
    assert "worker 0 was killed by SIGKILL" in errors


def test_a_request_to_stop_is_heard_between_two_parts_of_a_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        done = 0

        def prepare(self, report: Report) -> None:
            for part in range(10):
                report("slowly", part, 10)
                self.done += 1

    source = Slow()
    monkeypatch.setattr("gpipe_cli.trainer.batches.build_source", lambda *_: source)
    world = World(0, 1, 1, torch.device("cpu"), torch.device("cpu"), None, None, None)
    settings = make_request(["debug=tiny"]).settings
    with pytest.raises(PlainError, match="ended while the data were prepared"):
        open_source(settings, world, Notices(print, True), lambda: source.done == 3, print)
    assert source.done == 3
