"""Tests runs with tied parameters: the same bits for every K, one entry in a checkpoint, one optimizer state."""

from __future__ import annotations

from pathlib import Path

import own_model
import pytest
import torch
from inline_run import train_inline
from safetensors.torch import load_file

from gpipe_cli.checkpoint.choose import open_checkpoint
from gpipe_cli.checkpoint.files import CheckpointInfo, step_directory
from gpipe_cli.checkpoint.layer_state import export_state_dict

STEPS = 3
TIED = (
    *(*own_model.WORDS, "model._target_=own_model.with_ties", "optimizer=adam", "optimizer.lr=0.01", "pipeline.M=3"),
    *("trainer.average=0.9", "trainer.gradient_clip=0.1", "checkpoint.every=1", "checkpoint.keep=9"),
)
NAMES = ("first.weight", "back.weight", "last.weight")


def trained(folder: Path, *words: str) -> CheckpointInfo:
    train_inline(folder, *TIED, f"trainer.steps={STEPS}", *words)
    return open_checkpoint(step_directory(folder, STEPS))


def require_equal(one: CheckpointInfo, other: CheckpointInfo) -> None:
    """Compares all that two checkpoints hold, bit for bit."""
    for layer in one.layers:
        mine, theirs = tensors_of(one, layer), tensors_of(other, layer)
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == [], layer


def tensors_of(info: CheckpointInfo, layer: str) -> dict[str, torch.Tensor]:
    return load_file(info.layer_path(layer))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    return trained(tmp_path_factory.mktemp("runs") / "whole", "pipeline.K=1")


def test_every_cut_gives_the_same_files_and_evaluations_change_nothing(tmp_path: Path, whole: CheckpointInfo) -> None:
    words = ("pipeline.K=2", "pipeline.partition=[3,2]", "pipeline.remat=always", "trainer.evaluate_every=1")
    require_equal(trained(tmp_path, *words), whole)


def test_modules_that_builders_share_train_as_declared_ties_do_at_every_cut(tmp_path: Path) -> None:
    words = ("+model.kind=shared", "pipeline.schedule=zero_bubble")
    one, five = (trained(tmp_path / K, f"pipeline.K={K}", *words) for K in "15")
    require_equal(one, five)
    assert [file.tied for file in one.layers.values()] == [{}, {}, {}, *[{"weight": ("first", "weight")}] * 2]


def test_a_checkpoint_holds_a_tied_parameter_once_and_an_export_under_every_name(whole: CheckpointInfo) -> None:
    held = {layer: {key for key in tensors_of(whole, layer) if key.endswith(":weight")} for layer in whole.layers}
    assert held["first"] == {f"{kind}:weight" for kind in ("weight", "average")} | {
        f"optimizer:{key}:weight" for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert held["back"] == held["last"] == set()
    for average in (False, True):
        exported = export_state_dict(whole, average)
        assert all(torch.equal(exported[name], exported[NAMES[0]]) for name in NAMES)


def test_a_resume_at_another_k_gives_the_same_files(tmp_path: Path, whole: CheckpointInfo) -> None:
    start = f"checkpoint.resume={step_directory(whole.run_dir, 1)}"
    require_equal(trained(tmp_path / "rest", "pipeline.K=4", start), whole)


def test_a_frozen_tied_parameter_stays_what_its_owner_drew(tmp_path: Path) -> None:
    words = ("+model.kind=frozen", "optimizer.weight_decay=0.1", "pipeline.K=3")
    info = trained(tmp_path / "run", *words)
    first = export_state_dict(open_checkpoint(step_directory(tmp_path / "run", 1)))
    last = export_state_dict(info)
    assert all(torch.equal(last[name], first[NAMES[0]]) for name in NAMES)
    assert not torch.equal(last["middle.weight"], first["middle.weight"])
