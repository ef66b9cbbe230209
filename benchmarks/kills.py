"""Kills workers of one run at random moments, one at a time, and compares its end with that of an undisturbed run.

The run trains the model of `planted_faults.py`, with dropout, BatchNorm and Adam, on a worker for each cell, with a
checkpoint after each step and `launch.restarts`. A worker drawn at random gets SIGKILL: while the workers start
(`starting`), during a step or an evaluation (`training`), or while a checkpoint is being written (`saving`). At the end
all tensors of the last checkpoints (weights, buffers, optimizer states) and all losses must agree bit for bit;
otherwise the exit code is 1.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.common import Row, environment, parser, report
from benchmarks.planted_faults import SUBJECT
from gpipe_cli.checkpoint.files import latest, step_directories

POLL_SECONDS, PATIENCE_SECONDS = 0.002, 300.0
MOMENTS = {"starting": 3.0, "training": 0.1, "saving": 0.0}  # seconds within which the kill comes
COLUMNS = {**dict.fromkeys(("K", "steps", *MOMENTS), "d"), "minutes": ".1f", "same bits": ""}
TRAIN = (
    *(sys.executable, "-m", "gpipe_cli.commands.train", *SUBJECT, "model.odd=slow", "pipeline.partition=auto"),
    *("logging.tensorboard=false", "trainer.evaluate_first=false", "trainer.samples=0"),
    *("checkpoint.every=1", "checkpoint.keep=1"),
)


def train(run_dir: Path, K: int, steps: int, restarts: int = 0) -> subprocess.Popen[bytes]:
    """Starts the run in ``run_dir``; its output goes to a file there."""
    run_dir.mkdir(parents=True)
    words = [f"pipeline.K={K}", f"pipeline.workers={K}", f"trainer.steps={steps}", f"hydra.run.dir={run_dir}"]
    words += [f"trainer.evaluate_every={max(1, steps // 20)}", f"launch.restarts={restarts}"]
    with (run_dir / "output").open("wb") as output:
        return subprocess.Popen([*TRAIN, *words], stdout=output, stderr=output, env=environment())


def disturb(command: subprocess.Popen[bytes], run_dir: Path, kills: int) -> Counter[str]:
    """Kills at most ``kills`` workers of a run, each after a restart from the last; returns how many by moment."""
    draw = random.Random(1)

    def wait(condition: Callable[[], object]) -> bool:
        """Returns False if the run ends before the condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if command.poll() is not None:
                return False
            if time.monotonic() > deadline:
                command.kill()
                raise SystemExit(f"the run does nothing any more: {run_dir}")
            time.sleep(POLL_SECONDS)
        return True

    def kill() -> bool:
        workers = workers_of(command.pid)
        with suppress(ProcessLookupError):
            if len(workers) > 1:  # one alone may be about to become another program
                os.kill(draw.choice(workers), signal.SIGKILL)
        return len(workers) > 1

    def kill_once() -> str:
        """Kills a worker at a random moment and waits for the restart; returns the moment, "" if the run has ended."""
        moment, saved = draw.choice(list(MOMENTS)), step_directories(run_dir)
        before = _lines(run_dir / "restarts.jsonl")
        reached = moment == "starting" or wait(lambda: step_directories(run_dir) not in (saved, []))
        time.sleep(draw.uniform(0, MOMENTS[moment]))
        if moment == "saving":
            reached = reached and wait(lambda: any(run_dir.glob("checkpoints/*.partial")))
        return moment if reached and wait(kill) and wait(lambda: _lines(run_dir / "restarts.jsonl") != before) else ""

    return Counter(moment for _ in range(kills) if (moment := kill_once()))


def workers_of(command: int) -> list[int]:
    """Returns the worker processes of gpipe-train: forks of its child."""
    starters = _of(command, "task/{}/children").split()
    children = [(starter, child) for starter in starters for child in _of(starter, "task/{}/children").split()]
    return [int(child) for starter, child in children if _of(child, "cmdline") == _of(starter, "cmdline")]


def _of(process: int | str, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}", name.format(process)).read_text()
    return ""


def same_end(one: Path, other: Path) -> bool:
    """Returns whether two runs agree bit for bit: every tensor of their last checkpoints, and all losses."""
    first, second = latest(one)[0], latest(other)[0]
    assert first is not None and second is not None
    tensors = all(_bits(first.layer_path(layer)) == _bits(second.layer_path(layer)) for layer in first.layers)
    return tensors and first.step == second.step and _losses(one) == _losses(other)


def _bits(path: Path) -> dict[str, bytes]:
    return {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in load_file(path).items()}


def _losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in _lines(run_dir / "metrics.jsonl")]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200, help="at most (default: 200)")
    options.add_argument("--steps", type=int, default=400, help="of the run (default: 400)")
    options.add_argument("--K", type=int, default=4, help="cells, and at first workers (default: 4)")
    arguments = options.parse_args()
    kills, steps = (3, 12) if arguments.quick else (arguments.kills, arguments.steps)
    equal = []

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            whole, disturbed = Path(folder) / "whole", Path(folder) / "disturbed"
            if train(whole, arguments.K, steps).wait() != 0:
                raise SystemExit((whole / "output").read_text())
            began = time.perf_counter()
            with train(disturbed, arguments.K, steps, 2 * kills) as command:
                done = disturb(command, disturbed, kills)
            if command.returncode != 0:
                raise SystemExit(f"failed after {done.total()} kills:\n{(disturbed / 'output').read_text()[-2000:]}")
            minutes = (time.perf_counter() - began) / 60
            equal.append(same_end(whole, disturbed))
        row: Row = {"K": arguments.K, "steps": steps, **{moment: done[moment] for moment in MOMENTS}}
        yield {**row, "minutes": minutes, "same bits": "yes" if equal[0] else "NO"}

    report(COLUMNS, rows(), arguments.output)
    sys.exit(0 if equal == [True] else 1)


if __name__ == "__main__":
    main()
