"""Tests Muon for a whole model: torch's updates, the same bits at every K and after a resume, plans, gpipe-verify."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from own_plan import ZEROS, planned
from planted_faults import verified
from torch import nn

from gpipe_cli.checkpoint.files import step_directory
from gpipe_cli.optim.muon import Muon, orthogonal

JOB = (
    *["debug=tiny", "model.tie_embeddings=true", "model.dropout=0.1", "model.positions=rotary", "optimizer=muon"],
    "optimizer.groups=[{match: '*.bias', lr_factor: 2}, {match: encoder.0.*, frozen: true}]",
    *["task.generation=null", "lr_schedule=constant", "pipeline.workers=1", "pipeline.schedule=1f1b"],
)


def test_matrices_are_updated_as_by_torchs_muon_and_the_others_as_by_the_rest() -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (4, 6), (5,))] for _ in "ab")
    groups = [{"params": ours[2:]}, {"params": ours[:2], "muon": True}]
    together = Muon(groups, partial(torch.optim.Adam, betas=(0.5, 0.5)), 0.1, matrix_lr_factor=2, momentum=0.5)
    muon = torch.optim.Muon(theirs[:2], 0.2, 0.0, momentum=0.5)
    adam = torch.optim.Adam(theirs[2:], 0.1, betas=(0.5, 0.5))
    for number in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        with patch("torch.zeros_like", side_effect=AssertionError) if number else nullcontext():  # state is made once
            together.step()
        muon.step()
        adam.step()
    for one, other in zip(ours, theirs, strict=True):  # bit for bit where both compute in bfloat16
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    kept = [{*together.state[parameter]} for parameter in ours]
    assert kept == [{"momentum_buffer"}] * 2 + [{"step", "exp_avg", "exp_avg_sq"}]


def test_singular_values_become_alike_and_a_convolution_is_a_matrix_of_its_outputs() -> None:
    drawn = torch.randn(9, 48, 16)
    together = orthogonal(drawn, 5)
    assert all(torch.equal(orthogonal(drawn[:n], 5), together[:n]) for n in (1, 2, 5))  # whatever the cut puts together
    values = torch.linalg.svdvals(together.double())
    assert values.min() > 0.6 and values.max() < 1.3
    flat, kernel = nn.Parameter(torch.ones(3, 8)), nn.Parameter(torch.ones(3, 2, 2, 2))
    flat.grad, kernel.grad = drawn[0, :3, :8], drawn[0, :3, :8].reshape(kernel.shape)
    Muon([{"params": [flat, kernel], "muon": True}], torch.optim.Adam).step()
    assert torch.equal(kernel.flatten(1), flat) and not torch.equal(flat, torch.ones(3, 8))
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "muon": True}], torch.optim.Adam)


def test_the_rest_has_its_own_momentum_and_no_learning_rate_of_its_own() -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    both = Muon([ours], partial(torch.optim.SGD, momentum=0.5), 0.1), torch.optim.SGD([theirs], 0.1, 0.5)
    for optimizer in (*both, *both):
        ours.grad = theirs.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"rest\.lr"):
        Muon([ours], partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_k_and_a_resume_at_another_give_the_same_bits(tmp_path: Path, precision: str) -> None:
    words = (*JOB, f"precision={precision}", "trainer.steps=4", "checkpoint.every=2", "trainer.average=0.9")
    train_inline(tmp_path / "one", *words, "pipeline.K=1")
    train_inline(tmp_path / "five", *words, "pipeline.K=5", "pipeline.schedule=zero_bubble", "trainer.steps=2")
    resume = f"checkpoint.resume={step_directory(tmp_path / 'five', 2)}"
    train_inline(tmp_path / "three", *words, "pipeline.K=3", resume)
    assert not changed(saved(tmp_path / "three", 4), saved(tmp_path / "one", 4))


def test_gpipe_verify_agrees_with_groups_and_both_optimizers(tmp_path: Path) -> None:
    report = verified(tmp_path, *JOB[:-2], "pipeline.K=3", subject=False)
    assert report["agrees"], report["findings"]


def test_a_plan_counts_one_number_for_a_hidden_weight_two_for_another_and_none_for_a_frozen_one() -> None:
    words = ("model._target_=own_plan.even_layers", *ZEROS, "task._target_=own_plan.OwnTask")
    groups = "optimizer.groups=[{match: layer_7.*, frozen: true}, {match: layer_6.*, muon: false}]"
    whole = planned(*words, "optimizer=muon", groups, "pipeline.K=1").cells[0]
    steps = 4 * (6 + 2)  # Adam counts in each of its parameters
    assert whole.optimizer == 4 * (6 * (64 * 64 + 2 * 64) + 2 * (64 * 64 + 64)) + steps
