"""Tests workers that wait for long preparations, and that a signal or a death ends all of them and is told by place."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_command import Command
from own_model import WORDS
from processes import command

from gpipe_cli.commands.plan import make_request
from gpipe_cli.data.source import Report
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import PlainError
from gpipe_cli.metrics.journal import Notices
from gpipe_cli.trainer.batches import open_source

SECONDS = 3.0  # longer than a message may take


@contextmanager
def preparing(folder: Path, workers: int, seconds: float) -> Iterator[Command]:
    options = (f"config={json.dumps({'seconds': seconds})}", 'preload=["torch"]', "grace_seconds=2.0")
    job = Command(folder, "prepare_data", str(workers), str(folder), *options)
    try:
        yield job
    finally:
        job.clean_up()


@pytest.mark.slow
def test_replicas_prepare_in_turn_and_no_message_times_out(tmp_path: Path) -> None:
    with preparing(tmp_path, 4, SECONDS) as job:
        *_, result = job.events()
        code, errors = job.end()
    assert code == 0, errors
    first, _, second, _ = result["value"]
    assert result["value"] == [first, 0, second, 0]
    assert second >= first + SECONDS


def test_a_worker_that_dies_preparing_leaves_no_other_waiting(tmp_path: Path) -> None:
    with preparing(tmp_path, 2, seconds=120.0) as job:
        job.wait_until_ready(1)
        os.kill(job.ready[0]["pid"], signal.SIGKILL)
        code, errors = job.end()
    assert code == 1
    assert "worker 0 was killed by SIGKILL" in errors


def test_a_request_to_stop_is_heard_in_a_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        done = 0

        def prepare(self, report: Report) -> None:
            for part in range(10):
                report("slowly", part, 10)
                self.done += 1

    source = Slow()
    monkeypatch.setattr("gpipe_cli.trainer.batches.build_source", lambda *_: source)
    world = World(0, 1, 1, torch.device("cpu"), torch.device("cpu"), None, None, None)
    context: Any = SimpleNamespace(stop_requested=lambda: source.done == 3, emit=print)
    settings = make_request(["debug=tiny"]).settings
    with pytest.raises(PlainError, match="ended while the data were prepared"):
        open_source(context, settings, world, Notices(print, True))
    assert source.done == 3


# -- deaths in a user's code -----------------------------------------------------------------------------------------


DOOMED = (
    *("data._target_=own_model.DoomedDigits", "++model.middle=Doomed"),
    *("pipeline.K=2", "pipeline.workers=2", "pipeline.partition=[2,2]", "trainer.steps=3", "logging.tensorboard=false"),
)
FORWARD = "step 2, cell 1, layer middle, micro-batch 0, forward"
BACKWARD = "step 2, cell 1, micro-batch 3, backward"
KILLED = "worker 1 was killed by SIGKILL (usually the kernel's out-of-memory killer: see `dmesg`, and use less memory"
CRASHED = "worker 1 was killed by SIGSEGV"
LAST_LINE = "rank_1.log:\nthe last line of the log\n"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("where", "how", "said"),
    [
        ("forward", "crash", [f"{CRASHED} at {FORWARD}\n", "Segmentation fault", "own_model.py", "in die"]),
        pytest.param("forward", "kill", [KILLED, f" per worker) at {FORWARD}\n", LAST_LINE], marks=SLOW),
        pytest.param("backward", "exit", [f"exit code 3 and left no error report at {BACKWARD}\n"], marks=SLOW),
        pytest.param("data", "exit", ["worker 0 ended", "at step 2, reading the next mini-batch\n"], marks=SLOW),
    ],
)
def test_the_place_of_a_death_is_told(where: str, how: str, said: list[str], tmp_path: Path) -> None:
    done = command("train", *WORDS, *DOOMED, f"hydra.run.dir={tmp_path}", WHERE=where, HOW=how)
    assert done.returncode == 1, done.stdout + done.stderr
    for text in said:
        assert text in done.stderr, done.stderr
