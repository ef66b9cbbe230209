"""Tests that the death of a worker in a user's code is told by place: cell, micro-batch, of a forward the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_model import WORDS
from processes import command

DOOMED = (
    *("data._target_=own_model.DoomedDigits", "++model.middle=Doomed"),
    *("pipeline.K=2", "pipeline.workers=2", "pipeline.partition=[2,2]", "trainer.steps=3", "logging.tensorboard=false"),
)
FORWARD = "step 2, cell 1, layer middle, micro-batch 0, forward"
BACKWARD = "step 2, cell 1, micro-batch 3, backward"
KILLED = (
    "worker 1 was killed by SIGKILL (usually the kernel's out-of-memory killer: see `dmesg`, and use less memory per"
)
CRASHED = "worker 1 was killed by SIGSEGV"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("where", "how", "said"),
    [
        ("forward", "crash", [f"{CRASHED} at {FORWARD}\n", "Segmentation fault", "own_model.py", "in die"]),
        pytest.param("forward", "kill", [KILLED, f" worker) at {FORWARD}\n"], marks=SLOW),
        pytest.param("backward", "exit", [f"exit code 3 and left no error report at {BACKWARD}\n"], marks=SLOW),
        pytest.param("data", "exit", ["worker 0 ended", "at step 2, reading the next mini-batch\n"], marks=SLOW),
    ],
)
def test_the_place_of_a_death_is_told(where: str, how: str, said: list[str], tmp_path: Path) -> None:
    done = command("train", *WORDS, *DOOMED, f"hydra.run.dir={tmp_path}", WHERE=where, HOW=how)
    assert done.returncode == 1, done.stdout + done.stderr
    for text in said:
        assert text in done.stderr, done.stderr
