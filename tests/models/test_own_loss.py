"""Tests a module that returns its own mean loss, and a loss that is a function: as with the whole mini-batch."""

from pathlib import Path

import pytest
import torch
from inline_run import train_inline
from own_module import HalfEmpty, PaddedTexts, TiedTexts, WithDividedLoss, WithLoss, smoothed_loss
from planted_faults import verified
from safetensors.torch import load_file
from torch import Tensor, nn

from gpipe_cli.commands import export
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_task
from gpipe_cli.tasks.own_loss import LossFunctionTask

SEED, LR = 7, 0.5
COMMON = [
    *("model=module", "model.trust=true", "model.pad_id=0", "data._target_=own_module.PaddedTexts"),
    *(f"seed={SEED}", "trainer.steps=1", "trainer.evaluate_first=false", "checkpoint.every=1"),
    *("optimizer=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *("trainer.gradient_clip=null", "lr_schedule=constant", "lr_schedule.warmup_steps=0"),
]
WORDS = [*COMMON, "model.module._target_=own_module.WithLoss", "task=own_loss", "task.ignored=0", "data.batch_size=8"]


def trained(folder: Path, *words: str) -> dict[str, Tensor]:
    summary, _ = train_inline(folder, *words)
    assert summary["evaluation"]["loss"] > 0
    assert export.main([str(folder), f"output={folder / 'model.safetensors'}"]) == 0
    return load_file(folder / "model.safetensors")


def plainly_trained(kind: type[WithLoss | WithDividedLoss], data: type[PaddedTexts]) -> nn.Module:
    """Returns a module after a step on a whole mini-batch."""
    torch.manual_seed(SEED)
    module = kind()
    ((ids,), (targets,)) = next(data(8, SEED).train(None, 1, 0, 1)).micro_batches[0]
    loss = module(ids, targets.masked_fill(targets == 0, -100)).loss
    assert loss is not None
    loss.backward()
    torch.optim.SGD(module.parameters(), LR).step()
    return module


def test_micro_batches_count_by_their_targets(tmp_path: Path) -> None:
    """Each has another number of targets, so that the mean of their means would be another loss."""
    module = plainly_trained(WithLoss, PaddedTexts)
    one, four = (trained(tmp_path / f"k{K}", *WORDS, f"pipeline.K={K}", "pipeline.M=4") for K in (1, 4))
    for name, parameter in module.named_parameters():
        assert torch.equal(one[name], four[name])
        assert torch.allclose(one[name], parameter, rtol=1e-6, atol=1e-7), name


def test_a_micro_batch_without_targets_contributes_nothing(tmp_path: Path) -> None:
    """Its mean is not a number, and nor are the gradients of a sum divided by a count."""
    words = [*COMMON, "model.module._target_=own_module.WithDividedLoss", "data._target_=own_module.HalfEmpty"]
    words += ["data.batch_size=8", "task=own_loss", "task.ignored=0", "pipeline.M=2"]
    module = plainly_trained(WithDividedLoss, HalfEmpty)
    for kind, K in (("gpipe", 2), ("zero_bubble", 1)):
        ours = trained(tmp_path / kind, *words, f"pipeline.K={K}", f"pipeline.schedule={kind}")
        for name, parameter in module.named_parameters():
            assert torch.allclose(ours[name], parameter, rtol=1e-6, atol=1e-7), name
    assert verified(tmp_path / "verified", *words, "pipeline.K=3", "verify.dtype=float64", subject=False)["agrees"]


def test_a_loss_function_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Four micro-batches of ten examples have three or two, so that the mean of their means would be another loss."""
    torch.manual_seed(SEED)
    module, data = TiedTexts(), PaddedTexts(10, SEED).train(None, 1, 0, 1)
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(2):
        ((ids,), (targets,)) = next(data).micro_batches[0]
        optimizer.zero_grad()
        smoothed_loss(module(ids), targets, 0.1).backward()
        optimizer.step()
    words = [*COMMON, "model.module._target_=own_module.TiedTexts", "data.batch_size=10", "trainer.steps=2"]
    words += ["task._target_=own_module.smoothed_loss", "task.smoothing=0.1"]
    for M in (1, 4):
        one, two = (trained(tmp_path / f"{K}_{M}", *words, f"pipeline.K={K}", f"pipeline.M={M}") for K in (1, 2))
        for name, parameter in module.named_parameters():
            assert torch.equal(one[name], two[name])
            assert torch.allclose(one[name], parameter, rtol=1e-5, atol=1e-7), name


def test_losses_of_torch_are_tasks_as_they_are() -> None:
    logits, labels = torch.randn(6, 3), torch.arange(6) % 3
    wanted = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum")
    for name in ("torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy"):
        loss, _ = build_task({"_target_": name, "label_smoothing": 0.2}).loss((logits,), (labels,))
        assert torch.allclose(loss, wanted)


def test_a_loss_function_that_returns_no_mean_is_refused() -> None:
    task = build_task({"_target_": "torch.nn.CrossEntropyLoss", "reduction": "none"})
    with pytest.raises(ConfigurationError, match=r"a tensor of shape \[2\]: it must return one number, the mean"):
        task.loss((torch.zeros(2, 3),), (torch.zeros(2, dtype=torch.int64),))


def mean_of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=0)


def test_a_mean_over_other_things_than_examples_is_told_once(tmp_path: Path) -> None:
    words = [*COMMON, "model.module._target_=own_module.TiedTexts", "data.batch_size=8", "pipeline.cost=flops"]
    for loss, M, times in (("test_own_loss.mean_of_tokens", 8, 1), ("own_module.smoothed_loss", 2, 0)):
        _, events = train_inline(tmp_path / loss, *words, f"task._target_={loss}", f"pipeline.M={M}")
        told = [event["text"] for event in events if "gradients depend on M" in event.get("text", "")]
        assert len(told) == times
        assert all("Pipeline.of(weight=lambda targets: (targets != -100).sum())" in text for text in told)


def test_a_half_precision_loss_of_many_examples_does_not_overflow() -> None:
    task = LossFunctionTask(lambda outputs, targets: outputs.mean())
    total, _ = task.loss((torch.full((4096, 1), 100.0, dtype=torch.float16),), (torch.zeros(4096),))
    assert total.item() == 409_600
