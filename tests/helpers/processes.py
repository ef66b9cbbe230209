"""Runs commands as processes, as a person does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAIN = ["-m", "gpipe_cli.commands.train"]


def run(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; the helpers may be imported in it."""
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    line = [*map(str, words)]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def command(name: str, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of gpipe by the name of its module, as "train"."""
    return run(sys.executable, "-m", f"gpipe_cli.commands.{name}", *words, cwd=cwd, **environment)


def signalled(words: Sequence[object], run_dir: Path, steps: int, number: signal.Signals) -> int:
    """Runs a command beside its run, sends it a signal after so many steps, and returns its exit code."""
    line, metrics = [*map(str, words)], run_dir / "metrics.jsonl"
    with subprocess.Popen(line, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        while running.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= steps):
            time.sleep(0.01)
        running.send_signal(number)
        running.communicate(timeout=60)
    return running.returncode


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a command has printed, which must not have failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
