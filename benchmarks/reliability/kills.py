"""Kills workers of one run at random moments, one at a time, and compares its end with that of an undisturbed run.

The run trains a tiny model with dropout, BatchNorm and Adam (`planted_faults/subject.py`) on a worker for each cell,
with a checkpoint after each step and `launch.restarts`. A worker drawn at random gets SIGKILL: while the workers start
(`starting`), during a step or an evaluation (`training`), or while a checkpoint is being written (`saving`). The kills
are spread over the steps: where the run lags behind, the next kill waits for the checkpoint that is due, and where it
is ahead, the next comes while the workers start. At the end all tensors of the last checkpoints (weights, buffers,
optimizer states) and all losses must agree bit for bit; otherwise the exit code is 1.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.common import Row, environment, parser, report
from benchmarks.reliability.planted_faults.subject import WORDS
from gpipe_cli.checkpoint.choose import latest
from gpipe_cli.checkpoint.files import step_directories, step_of

POLL_SECONDS = 0.002
STARTING_SECONDS = 3.0
PATIENCE_SECONDS = 300.0
TRAIN = (sys.executable, "-m", "gpipe_cli.commands.train", *WORDS, "model.odd=slow")
LEAVE_OUT = ("logging.tensorboard=false", "trainer.evaluate_first=false", "trainer.samples=0")


@dataclass
class Victim:
    """Holds a run whose workers are killed.

    Attributes:
        command: the process of gpipe-train.
        run_dir: of the run.
        random: draws the moments and the workers.
    """

    command: subprocess.Popen[bytes]
    run_dir: Path
    random: random.Random

    def restarts(self) -> int:
        return len(_lines(self.run_dir / "restarts.jsonl"))

    def workers(self) -> list[int]:
        """Returns the process ids of the workers: the forks of the command's child; none before there are two."""
        starters = _children(self.command.pid)
        forks = [child for starter in starters for child in _children(starter) if _words(child) == _words(starter)]
        return forks if len(forks) > 1 else []  # one alone may be about to become another program

    def kill_once(self, moment: str, due: int) -> bool:
        """Kills one worker at a random time in ``moment`` and waits for the restart; False when the run has ended.

        Args:
            due: the step of whose checkpoint the kill waits, unless the moment is "starting".
        """
        before, saved = self.restarts(), self.saved_step()
        if not self._wait(lambda: bool(self.workers())):
            return False
        if moment == "starting":
            end = time.monotonic() + self.random.uniform(0, STARTING_SECONDS)
            self._wait(lambda: time.monotonic() > end or self.saved_step() > saved)
        else:
            if not self._wait(lambda: self.saved_step() >= due):
                return False
            time.sleep(self.random.uniform(0, 0.1))
            if moment == "saving" and not self._wait(lambda: any(self.run_dir.glob("checkpoints/*.partial"))):
                return False
        return self._wait(self._kill_one) and self._wait(lambda: self.restarts() > before)

    def _kill_one(self) -> bool:
        """Kills a worker; False where there is none."""
        workers = self.workers()
        with contextlib.suppress(ProcessLookupError):
            if workers:
                os.kill(self.random.choice(workers), signal.SIGKILL)
        return bool(workers)

    def saved_step(self) -> int:
        """Returns the step of the newest checkpoint."""
        saved = step_directories(self.run_dir)
        return step_of(saved[-1]) if saved else 0

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.command.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.command.kill()
                raise SystemExit(f"the run does nothing any more: {self.run_dir}")
            time.sleep(POLL_SECONDS)
        return True


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _words(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def train(run_dir: Path, K: int, steps: int, *words: str) -> subprocess.Popen[bytes]:
    """Starts the run in ``run_dir``; its output goes to a file there."""
    run_dir.mkdir(parents=True)
    common = [f"pipeline.K={K}", f"pipeline.workers={K}", f"trainer.steps={steps}", f"hydra.run.dir={run_dir}"]
    often = [f"trainer.evaluate_every={max(1, steps // 20)}", "checkpoint.every=1", "checkpoint.keep=1"]
    with (run_dir / "output").open("wb") as output:
        words = (*TRAIN, *LEAVE_OUT, *common, *often, *words)
        return subprocess.Popen(words, stdout=output, stderr=output, env=environment())


def disturb(run_dir: Path, K: int, steps: int, kills: int, seed: int) -> Counter[str]:
    """Trains and kills ``kills`` workers, spread over the steps; returns the number of kills by moment."""
    done: Counter[str] = Counter()
    with train(run_dir, K, steps, f"launch.restarts={2 * kills}") as command:
        victim = Victim(command, run_dir, random.Random(seed))
        while sum(done.values()) < kills:
            due = steps * sum(done.values()) // kills
            ahead = victim.saved_step() > due + 1
            moment = "starting" if ahead else victim.random.choice(("starting", "training", "saving"))
            if not victim.kill_once(moment, due):
                break
            done[moment] += 1
    if command.returncode != 0:
        raise SystemExit(
            f"the run failed after {sum(done.values())} kills:\n{(run_dir / 'output').read_text()[-2000:]}"
        )
    return done


def same_end(one: Path, other: Path) -> bool:
    """Returns whether two runs agree bit for bit: every tensor of their last checkpoints, and all losses."""
    first, second = latest(one).checkpoint, latest(other).checkpoint
    assert first is not None and second is not None
    files = [(first.layer_path(layer), second.layer_path(layer)) for layer in first.layers]
    tensors = all(_bits(a) == _bits(b) for a, b in files)
    return tensors and first.step == second.step and _losses(one) == _losses(other)


def _bits(path: Path) -> dict[str, bytes]:
    return {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in load_file(path).items()}


def _losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in _lines(run_dir / "metrics.jsonl")]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200, help="default: 200")
    options.add_argument("--steps", type=int, default=400, help="of the run (default: 400)")
    options.add_argument("--K", type=int, default=4, help="cells, and at first workers (default: 4)")
    options.add_argument("--seed", type=int, default=1, help="of the moments and the workers (default: 1)")
    arguments = options.parse_args()
    kills, steps = (3, 12) if arguments.quick else (arguments.kills, arguments.steps)
    equal = False

    def rows() -> Iterator[Row]:
        nonlocal equal
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            whole, disturbed = Path(folder) / "whole", Path(folder) / "disturbed"
            if train(whole, arguments.K, steps).wait() != 0:
                raise SystemExit((whole / "output").read_text())
            began = time.perf_counter()
            done = disturb(disturbed, arguments.K, steps, kills, arguments.seed)
            seconds = time.perf_counter() - began
            equal = same_end(whole, disturbed)
            restarts = json.loads((disturbed / "summary.json").read_text())["restarts"]
        row: Row = {"K": arguments.K, "steps": steps, "kills": sum(done.values())}
        row |= {moment: done[moment] for moment in ("starting", "training", "saving")}
        row |= {"restarts": len(restarts), "last workers": restarts[-1]["workers"], "minutes": seconds / 60}
        yield {**row, "same bits": "yes" if equal else "NO"}

    counts = ("K", "steps", "kills", "starting", "training", "saving", "restarts", "last workers")
    columns = {**dict.fromkeys(counts, "d"), "minutes": ".1f", "same bits": "s"}
    report(columns, rows(), arguments.output)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
