"""Runs commands as processes, as a person does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAIN = ["-m", "gpipe_cli.commands.train"]


def run(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; the helpers may be imported in it."""
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def command(name: str, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of gpipe by the name of its module, as "train"."""
    return run(sys.executable, "-m", f"gpipe_cli.commands.{name}", *words, cwd=cwd, **environment)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a command has printed, which must not have failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
