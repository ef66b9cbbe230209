"""Tests that replicas that share BatchNorm's statistics train as one model with larger micro-batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from inline_run import train_inline
from run_files import losses

from gpipe_cli.launch.supervisor import Job, launch


def test_two_replicas_have_the_gradients_and_statistics_of_the_joined_mini_batch(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, "sync_batchnorm_jobs:compare", {}, preload=("torch", "torch.distributed"))
    found = launch(job, lambda event: None)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_command_trains_two_replicas_as_one_with_sync_batchnorm(tmp_path: Path) -> None:
    words = ["debug=tiny", "model=amoebanet", "model.L=3", "trainer.steps=2", "trainer.evaluate_every=null"]
    words += ["optimizer.lr=1e-4", "pipeline.K=1", "pipeline.M=1", "logging.tensorboard=false"]
    train_inline(tmp_path / "one", *words)
    command = [sys.executable, "-m", "gpipe_cli.commands.train", *words, "pipeline.replicas=2"]
    command += ["pipeline.sync_batchnorm=true", f"hydra.run.dir={tmp_path / 'two'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two, said = losses(tmp_path / "one"), losses(tmp_path / "two"), done.stdout
    assert two == pytest.approx(one, rel=1e-4)
    assert "over 16 examples: mini-batch 16, M=1, 2 replicas together" in said
