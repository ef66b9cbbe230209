"""Tests task=own_loss: a module that returns its own mean loss trains as with the whole mini-batch, at every K."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inline_run import train_inline
from own_module import PaddedTexts, WithLoss
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.reliability.planted_faults.run import verified
from gpipe_cli.commands import export
from gpipe_cli.jobs.own_target import complete
from gpipe_cli.tasks.own_loss import OwnLossTask

SEED, LR = 7, 0.5
WORDS = [
    *("model=module", "model.module._target_=own_module.WithLoss", "model.pad_id=0"),
    *("data._target_=own_module.PaddedTexts", "data.batch_size=8", "task=own_loss", "task.ignored=0"),
    *(f"seed={SEED}", "trainer.steps=1", "trainer.evaluate_first=false", "checkpoint.every=1"),
    *("optimizer=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *("trainer.gradient_clip=null", "lr_schedule.warmup_steps=0"),
]


def trained(folder: Path, *words: str) -> dict[str, Tensor]:
    summary, _ = train_inline(folder, *complete([*WORDS, *words]))
    assert summary["evaluation"]["loss"] > 0
    assert export.main([str(folder), f"output={folder / 'model.safetensors'}"]) == 0
    return load_file(folder / "model.safetensors")


def test_micro_batches_count_by_their_targets(tmp_path: Path) -> None:
    """Each has another number of targets, so that the mean of their means would be another loss."""
    torch.manual_seed(SEED)
    module = WithLoss()
    ((ids,), (targets,)) = next(PaddedTexts(8, SEED).train(None, 1, 0, 1)).micro_batches[0]
    loss = module(ids, targets.masked_fill(targets == 0, -100)).loss
    assert loss is not None
    loss.backward()
    torch.optim.SGD(module.parameters(), LR).step()
    one, four = (trained(tmp_path / f"k{K}", f"pipeline.K={K}", "pipeline.M=4") for K in (1, 4))
    for name, parameter in module.named_parameters():
        assert torch.equal(one[name], four[name])
        assert torch.allclose(one[name], parameter, rtol=1e-6, atol=1e-7), name


def test_gpipe_verify_finds_the_plain_loop_in_float64(tmp_path: Path) -> None:
    report = verified(tmp_path, *WORDS, "pipeline.K=3", "pipeline.M=2", "verify.dtype=float64", subject=False)
    assert report["verdict"].startswith("OK, bit for bit"), report["findings"]
    assert "in float64" in report["verdict"]


@pytest.mark.slow
def test_an_error_on_one_of_two_workers_ends_gpipe_verify(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"model\.output=loss"):
        verified(tmp_path, *WORDS, "pipeline.K=2", "pipeline.workers=2", "model.output=logits", subject=False)


def test_an_output_that_is_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.output=loss"):
        OwnLossTask().loss((torch.zeros(2, 3),), (torch.zeros(2, dtype=torch.int64),))
