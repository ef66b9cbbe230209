"""Kills workers of one run at random moments, one at a time, and compares its end with that of an undisturbed run.

The run trains a tiny model with dropout, BatchNorm and Adam (`planted_faults/subject.py`) on a worker for each cell,
with a checkpoint after each step and `launch.restarts`. A worker drawn at random gets SIGKILL: while the workers start
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
from benchmarks.reliability.planted_faults.subject import WORDS
from gpipe_cli.checkpoint.files import latest, step_directories

POLL_SECONDS, PATIENCE_SECONDS = 0.002, 300.0
SEED = 1  # of the moments and the workers
MOMENTS = {"starting": 3.0, "training": 0.1, "saving": 0.0}  # seconds within which the kill comes
TRAIN = (sys.executable, "-m", "gpipe_cli.commands.train", *WORDS, "model.odd=slow")
LEAVE_OUT = ("logging.tensorboard=false", "trainer.evaluate_first=false", "trainer.samples=0")


class Victim:
    """Holds a run whose workers are killed.

    Args:
        command: the process of gpipe-train.
        run_dir: of the run.
    """

    def __init__(self, command: subprocess.Popen[bytes], run_dir: Path) -> None:
        self._command, self._run_dir, self._random = command, run_dir, random.Random(SEED)

    def kill_once(self) -> str:
        """Kills one worker at a random moment, waits for the restart, and returns the moment; "": the run has ended."""
        moment, restarts = self._random.choice(list(MOMENTS)), self._restarts()
        saved = self._saved()
        reached = moment == "starting" or self._wait(lambda: self._saved() not in (saved, ""))
        time.sleep(self._random.uniform(0, MOMENTS[moment]))
        if moment == "saving":
            reached = reached and self._wait(lambda: any(self._run_dir.glob("checkpoints/*.partial")))
        return moment if reached and self._wait(self._kill) and self._wait(lambda: self._restarts() > restarts) else ""

    def _restarts(self) -> int:
        return len(_lines(self._run_dir / "restarts.jsonl"))

    def _saved(self) -> str:
        return next((directory.name for directory in reversed(step_directories(self._run_dir))), "")

    def _kill(self) -> bool:
        """Kills a worker; False where there are none: the forks of the command's child, at least two."""
        starters = _of(self._command.pid, "task/{}/children").split()
        children = [(starter, child) for starter in starters for child in _of(starter, "task/{}/children").split()]
        forks = [int(child) for starter, child in children if _of(child, "cmdline") == _of(starter, "cmdline")]
        with suppress(ProcessLookupError):
            if len(forks) > 1:  # one alone may be about to become another program
                os.kill(self._random.choice(forks), signal.SIGKILL)
        return len(forks) > 1

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self._command.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self._command.kill()
                raise SystemExit(f"the run does nothing any more: {self._run_dir}")
            time.sleep(POLL_SECONDS)
        return True


def _of(process: int | str, name: str) -> str:
    try:
        return Path(f"/proc/{process}", name.format(process)).read_text()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def train(run_dir: Path, K: int, steps: int, *words: str) -> subprocess.Popen[bytes]:
    """Starts the run in ``run_dir``; its output goes to a file there."""
    run_dir.mkdir(parents=True)
    common = [f"pipeline.K={K}", f"pipeline.workers={K}", f"trainer.steps={steps}", f"hydra.run.dir={run_dir}"]
    often = [f"trainer.evaluate_every={max(1, steps // 20)}", "checkpoint.every=1", "checkpoint.keep=1"]
    with (run_dir / "output").open("wb") as output:
        words = (*TRAIN, *LEAVE_OUT, *common, *often, *words)
        return subprocess.Popen(words, stdout=output, stderr=output, env=environment())


def disturb(run_dir: Path, K: int, steps: int, kills: int) -> Counter[str]:
    """Trains and kills at most ``kills`` workers; returns the number of kills by moment."""
    with train(run_dir, K, steps, f"launch.restarts={2 * kills}") as command:
        victim = Victim(command, run_dir)
        done = Counter(moment for _ in range(kills) if (moment := victim.kill_once()))
    if command.returncode != 0:
        raise SystemExit(f"the run failed after {done.total()} kills:\n{(run_dir / 'output').read_text()[-2000:]}")
    return done


def same_end(one: Path, other: Path) -> bool:
    """Returns whether two runs agree bit for bit: every tensor of their last checkpoints, and all losses."""
    first, second = latest(one)[0], latest(other)[0]
    assert first is not None and second is not None
    files = [(first.layer_path(layer), second.layer_path(layer)) for layer in first.layers]
    tensors = all(_bits(a) == _bits(b) for a, b in files)
    return tensors and first.step == second.step and losses(one) == losses(other)


def _bits(path: Path) -> dict[str, bytes]:
    return {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in load_file(path).items()}


def losses(run_dir: Path) -> list[float]:
    """Returns the loss of every step."""
    return [json.loads(line)["loss"] for line in _lines(run_dir / "metrics.jsonl")]


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
            done = disturb(disturbed, arguments.K, steps, kills)
            minutes = (time.perf_counter() - began) / 60
            equal.append(same_end(whole, disturbed))
        row: Row = {"K": arguments.K, "steps": steps, **{moment: done[moment] for moment in MOMENTS}}
        yield {**row, "minutes": minutes, "same bits": "yes" if equal[0] else "NO"}

    report(
        {**dict.fromkeys(("K", "steps", *MOMENTS), "d"), "minutes": ".1f", "same bits": ""}, rows(), arguments.output
    )
    sys.exit(0 if equal == [True] else 1)


if __name__ == "__main__":
    main()
