"""Tests runs with tied parameters: the same bits for every K, one entry in a checkpoint, one optimizer state."""

from __future__ import annotations

from pathlib import Path

import own_model
import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from processes import command, succeeded

from gpipe_cli.checkpoint.files import open_checkpoint, step_directory
from gpipe_cli.checkpoint.layer_state import export_state_dict

STEPS = 3
TIED = (
    *(*own_model.WORDS, "model._target_=own_model.with_ties", "optimizer=adam", "optimizer.lr=0.01", "pipeline.M=3"),
    *("trainer.average=0.9", "trainer.gradient_clip=0.1", "checkpoint.every=1", "checkpoint.keep=9"),
)
NAMES = ("first.weight", "back.weight", "last.weight")


def trained(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """Returns all that the last checkpoint holds."""
    train_inline(folder, *TIED, f"trainer.steps={STEPS}", *words)
    return saved(folder, STEPS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains with one cell."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trained(folder, "pipeline.K=1")
    return folder


def test_every_cut_gives_the_same_files_and_evaluations_change_nothing(tmp_path: Path, run: Path) -> None:
    """Each of the three layers that use the parameter is on a worker of its own."""
    words = (f"trainer.steps={STEPS}", "pipeline.K=4", "pipeline.partition=[2,1,1,1]", "pipeline.workers=3")
    more = ("pipeline.remat=always", "trainer.evaluate_every=1", "logging.tensorboard=false")
    succeeded(command("train", *TIED, *words, *more, f"hydra.run.dir={tmp_path}"))
    assert not changed(saved(tmp_path, STEPS), saved(run, STEPS))


def test_modules_that_builders_share_train_as_declared_ties_do_at_every_cut(tmp_path: Path) -> None:
    words = ("+model.kind=shared", "pipeline.schedule=zero_bubble")
    one, five = (trained(tmp_path / K, f"pipeline.K={K}", *words) for K in "15")
    assert not changed(one, five)
    layers = open_checkpoint(step_directory(tmp_path / "1", STEPS)).layers.values()
    assert [file.tied for file in layers] == [{}, {}, {}, *[{"weight": ("first", "weight")}] * 2]


def test_a_checkpoint_holds_a_tied_parameter_once_and_an_export_under_every_name(run: Path) -> None:
    held = {name for name in saved(run, STEPS) if name.endswith(":weight") and not name.startswith("middle")}
    kinds = ("weight", "average", *(f"optimizer:{key}" for key in ("step", "exp_avg", "exp_avg_sq")))
    assert held == {f"first/{kind}:weight" for kind in kinds}
    for average in (False, True):
        exported = export_state_dict(open_checkpoint(step_directory(run, STEPS)), average)
        assert all(torch.equal(exported[name], exported[NAMES[0]]) for name in NAMES)


def test_a_resume_at_another_k_gives_the_same_files(tmp_path: Path, run: Path) -> None:
    start = f"checkpoint.resume={step_directory(run, 1)}"
    assert not changed(trained(tmp_path / "rest", "pipeline.K=4", start), saved(run, STEPS))


def test_a_frozen_tied_parameter_stays_what_its_owner_drew(tmp_path: Path) -> None:
    trained(tmp_path / "run", "+model.kind=frozen", "optimizer.weight_decay=0.1", "pipeline.K=3")
    first, last = (export_state_dict(open_checkpoint(step_directory(tmp_path / "run", step))) for step in (1, STEPS))
    assert all(torch.equal(last[name], first[NAMES[0]]) for name in NAMES)
    assert not torch.equal(last["middle.weight"], first["middle.weight"])
