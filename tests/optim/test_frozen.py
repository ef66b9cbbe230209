"""Tests weights that do not learn: nothing changes them, and optimizer, plans and gpipe-verify know it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import own_model
import pytest
import torch
from inline_run import train_inline
from own_plan import planned

from benchmarks.reliability.planted_faults.run import verified
from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.checkpoint.layer_state import load_layer
from gpipe_cli.pipeline.cell import build_layer

FROZEN = (*own_model.WORDS, "model._target_=own_model.with_a_frozen_start", "trainer.steps=3", "pipeline.M=2")
DECAY = "optimizer={_target_: torch.optim.AdamW, lr: 0.1, weight_decay: 0.5}"


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers find the model too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))


def weights(run_dir: Path, layer: str) -> dict[str, torch.Tensor]:
    return load_layer(read_manifest(step_directory(run_dir, 3)), layer).weights


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_weight_decay_leaves_frozen_weights_alone(workers: int, tmp_path: Path, own_path: None) -> None:
    """With two workers the first holds nothing that learns."""
    words = [*FROZEN, DECAY, "pipeline.K=2", f"pipeline.workers={workers}", "pipeline.partition=[2,2]"]
    command = [sys.executable, "-m", "gpipe_cli.commands.train", *words, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    builders = own_model.with_a_frozen_start()
    first, last = (dict(build_layer(builders[i], i, 1, torch.device("cpu")).named_parameters()) for i in (1, 3))
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(tmp_path / "run", "first").items())
    assert not any(torch.equal(tensor, last[name]) for name, tensor in weights(tmp_path / "run", "last").items())


def test_the_optimizer_keeps_nothing_of_frozen_weights(tmp_path: Path) -> None:
    train_inline(tmp_path / "run", *FROZEN, DECAY, "pipeline.K=1")
    saved = read_manifest(step_directory(tmp_path / "run", 3))
    assert load_layer(saved, "first").optimizer == {}
    assert set(load_layer(saved, "last").optimizer) == {"weight", "bias"}


@pytest.mark.parametrize("workers", [(), pytest.param(("pipeline.workers=2",), marks=pytest.mark.slow)], ids=str)
def test_a_run_with_frozen_weights_is_the_plain_loop(workers: tuple[str, ...], tmp_path: Path, own_path: None) -> None:
    report = verified(tmp_path, *FROZEN, DECAY, "pipeline.K=2", *workers, subject=False)
    assert report["agrees"], report["findings"]


def test_a_plan_has_neither_gradients_nor_optimizer_state_for_frozen_weights() -> None:
    made = planned(*FROZEN, DECAY, "pipeline.K=2", "pipeline.partition=[2,2]", "trainer.average=0.9")
    frozen, learning = made.cells
    assert (frozen.parameters, frozen.weights) == (1544, 4 * 1544)
    assert (frozen.gradients, frozen.optimizer, frozen.average) == (0, 0, 4 * 1544)
    assert learning.gradients == 4 * 90
    assert learning.optimizer > 0
