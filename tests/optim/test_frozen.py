"""Tests weights that do not learn, frozen or used by nothing: nothing changes them, at any K and number of replicas."""

from pathlib import Path

import own_model
import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from own_plan import planned
from planted_faults import verified
from processes import command, succeeded

from gpipe_cli import Pipeline
from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.checkpoint.layer_state import load_layer

FROZEN = (*own_model.WORDS, "model._target_=own_model.with_a_frozen_start", "trainer.steps=3", "pipeline.M=2")
DECAY = "optimizer={_target_: torch.optim.AdamW, lr: 0.1, weight_decay: 0.5}"


def test_the_optimizer_keeps_nothing_of_frozen_weights(tmp_path: Path) -> None:
    train_inline(tmp_path / "run", *FROZEN, DECAY, "pipeline.K=1")
    saved = read_manifest(step_directory(tmp_path / "run", 3))
    assert load_layer(saved, "first").optimizer == {}
    assert set(load_layer(saved, "last").optimizer) == {"weight", "bias"}


def test_a_plan_has_neither_gradients_nor_optimizer_state_for_frozen_weights() -> None:
    made = planned(*FROZEN, DECAY, "pipeline.K=2", "pipeline.partition=[2,2]", "trainer.average=0.9")
    frozen, learning = made.cells
    assert (frozen.parameters, frozen.weights) == (1544, 4 * 1544)
    assert (frozen.gradients, frozen.optimizer, frozen.average) == (0, 0, 4 * 1544)
    assert learning.gradients == 4 * 90
    assert learning.optimizer > 0


# -- parameters that nothing used: torch leaves them alone -----------------------------------------------------------


WORDS = (*own_model.WORDS, DECAY, "trainer.steps=4", "seed=0")
IDLE = (*WORDS, "+model.middle=Idle", "pipeline.M=2")
CUT_OFF = (*WORDS, "model._target_=own_model.cut_off", "pipeline.M=2")


@pytest.mark.parametrize("words", [(*FROZEN, DECAY), IDLE], ids=["frozen", "idle"])
def test_a_run_with_weights_that_do_not_learn_is_the_plain_loop(words: tuple[str, ...], tmp_path: Path) -> None:
    report = verified(tmp_path, *words, "pipeline.K=2", subject=False)
    assert report["agrees"], report["findings"]


@pytest.mark.parametrize("words", [IDLE, CUT_OFF], ids=["idle", "cut off"])
def test_decay_leaves_unused_weights_alone_at_every_k(tmp_path: Path, words: tuple[str, ...]) -> None:
    for K in ("1", "2", "4"):
        train_inline(tmp_path / K, *words, f"pipeline.K={K}", "pipeline.workers=1")
    one, *others = (saved(tmp_path / K, 4) for K in "124")
    assert not any(changed(one, other) for other in others)
    names = ["middle/weight:spare.weight", *(["first/weight:weight"] if words is CUT_OFF else [])]
    digits = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    pipeline = Pipeline.of(own_model.layers("Idle"), torch.nn.functional.cross_entropy, digits, K=1, M=2)
    fresh = pipeline.state_dict()
    for name in names:
        assert torch.equal(one[name], fresh[name.replace("/weight:", ".")]), name
        assert not any(key.startswith(name.replace("weight:", "optimizer:", 1)) for key in one)
    assert not torch.equal(one["last/weight:weight"], fresh["last.weight"])


def test_workers_and_replicas_agree_about_what_is_used(tmp_path: Path) -> None:
    train_inline(tmp_path / "one", *CUT_OFF, "pipeline.K=2", "pipeline.workers=1")
    words = ("pipeline.K=2", "pipeline.workers=2", f"hydra.run.dir={tmp_path / 'two'}")
    succeeded(command("train", *CUT_OFF, *words))
    assert not changed(saved(tmp_path / "one", 4), saved(tmp_path / "two", 4))
    words = ("pipeline.M=1", "pipeline.K=1", "pipeline.replicas=2", f"hydra.run.dir={tmp_path / 'both'}")
    succeeded(command("train", *IDLE, *words))
    train_inline(tmp_path / "alone", *IDLE, "pipeline.K=1")
    assert not changed(saved(tmp_path / "alone", 4), saved(tmp_path / "both", 4))
