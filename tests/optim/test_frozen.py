"""Tests weights that do not learn: nothing changes them, and optimizer, plans and gpipe-verify know it."""

from __future__ import annotations

from pathlib import Path

import own_model
import torch
from inline_run import train_inline
from own_plan import planned

from benchmarks.planted_faults import verified
from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.checkpoint.layer_state import load_layer

FROZEN = (*own_model.WORDS, "model._target_=own_model.with_a_frozen_start", "trainer.steps=3", "pipeline.M=2")
DECAY = "optimizer={_target_: torch.optim.AdamW, lr: 0.1, weight_decay: 0.5}"


def weights(run_dir: Path, layer: str) -> dict[str, torch.Tensor]:
    return load_layer(read_manifest(step_directory(run_dir, 3)), layer).weights


def test_the_optimizer_keeps_nothing_of_frozen_weights(tmp_path: Path) -> None:
    train_inline(tmp_path / "run", *FROZEN, DECAY, "pipeline.K=1")
    saved = read_manifest(step_directory(tmp_path / "run", 3))
    assert load_layer(saved, "first").optimizer == {}
    assert set(load_layer(saved, "last").optimizer) == {"weight", "bias"}


def test_a_run_with_frozen_weights_is_the_plain_loop(tmp_path: Path) -> None:
    report = verified(tmp_path, *FROZEN, DECAY, "pipeline.K=2", subject=False)
    assert report["agrees"], report["findings"]


def test_a_plan_has_neither_gradients_nor_optimizer_state_for_frozen_weights() -> None:
    made = planned(*FROZEN, DECAY, "pipeline.K=2", "pipeline.partition=[2,2]", "trainer.average=0.9")
    frozen, learning = made.cells
    assert (frozen.parameters, frozen.weights) == (1544, 4 * 1544)
    assert (frozen.gradients, frozen.optimizer, frozen.average) == (0, 0, 4 * 1544)
    assert learning.gradients == 4 * 90
    assert learning.optimizer > 0
