"""Tests model=module: a traced module trains, is evaluated and exported like any list of layers, by its own names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inline_run import train_inline
from own_module import Noisy, mobile_net
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.commands import export
from gpipe_cli.data.images.digits import DigitsSource

SEED, LR, M = 7, 0.1, 2
MODULE = ["model=module", "model.module._target_=own_module.mobile_net"]
WORDS = [
    *(*MODULE, "model.trust=true", f"seed={SEED}", f"pipeline.M={M}", "data.batch_size=8", "checkpoint.every=1"),
    *("trainer.steps=1", "trainer.evaluate_every=null", "trainer.evaluate_first=false", "trainer.gradient_clip=null"),
    *("optimizer=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *("lr_schedule=constant", "lr_schedule.warmup_steps=0", "task.label_smoothing=0"),
]


def trained(folder: Path, *words: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the exported weights after a step, and the summary."""
    summary, _ = train_inline(folder, *WORDS, *words)
    assert export.main([str(folder), f"output={folder / 'model.safetensors'}"]) == 0
    return load_file(folder / "model.safetensors"), summary


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Tensor], dict[str, Any]]]:
    return {K: trained(tmp_path_factory.mktemp(f"k{K}"), f"pipeline.K={K}") for K in (1, 4)}


def test_a_traced_module_trains_as_the_module_itself(exported: dict[int, Any]) -> None:
    """The step of plain torch: the weights after it agree by name, and the export loads into the class."""
    torch.manual_seed(SEED)
    module = mobile_net()
    source = DigitsSource(batch_size=8, seed=SEED)
    source.prepare(lambda text, done, total: None)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for (images,), (labels,) in next(source.train(None, M, 0, 1)).micro_batches:
        logits = module((images / 255 - mean) / std)
        (F.cross_entropy(logits, labels, reduction="sum") / 8).backward()
    begun = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    torch.optim.SGD(module.parameters(), LR).step()
    weights, _ = exported[1]
    for name, parameter in module.named_parameters():
        step, largest = weights[name] - begun[name], (parameter - begun[name]).abs().max()
        assert (step - (parameter - begun[name])).abs().max() <= 1e-5 * largest + 1e-7, name
    assert not module.load_state_dict(weights).missing_keys


def test_every_cut_gives_the_same_bits(exported: dict[int, Any]) -> None:
    (one, _), (four, summary) = exported[1], exported[4]
    assert len(summary["cells"]) == 4
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)


@pytest.mark.slow
def test_noise_and_tied_weights_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    words = ["model.module._target_=own_module.Noisy", "trainer.steps=2", "checkpoint.every=2"]
    one, four = (trained(tmp_path / f"k{K}", *words, f"pipeline.K={K}")[0] for K in (1, 4))
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert not Noisy().load_state_dict(one).missing_keys
    assert torch.equal(one["table.weight"], one["again.weight"])
