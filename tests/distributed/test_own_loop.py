"""Tests the engine as a library: docs/examples/own_loop.py under torchrun computes gpipe-train's bits."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from inline_run import train_inline
from processes import TORCHRUN, run, succeeded
from run_files import losses as losses_of
from torch.nn.functional import cross_entropy

from gpipe_cli import Pipeline

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SAME = (
    *("model=layers", "model._target_=own_loop.layers", "data._target_=own_loop_data.Data"),
    *("task._target_=torch.nn.functional.cross_entropy", "optimizer._target_=torch.optim.AdamW", "optimizer.lr=0.005"),
    *("lr_schedule=constant", "trainer.gradient_clip=null", "trainer.steps=8", "trainer.evaluate_every=null"),
    *("pipeline.K=2", "pipeline.workers=1", "pipeline.M=4", "pipeline.schedule=1f1b", "pipeline.remat=always"),
    *("pipeline.threads=1", "seed=0"),
)


def test_a_loop_of_one_s_own_has_the_losses_of_gpipe_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = succeeded(run(*TORCHRUN, EXAMPLES / "own_loop.py", OMP_NUM_THREADS="1"))
    assert re.search(r"^\d+ of 128 are right$", said, re.MULTILINE)
    monkeypatch.syspath_prepend(EXAMPLES)
    train_inline(tmp_path, *SAME)
    assert [float(loss) for loss in re.findall(r"loss (\S+)", said)] == losses_of(tmp_path)
    assert len(losses_of(tmp_path)) == 8


def test_a_state_dict_goes_on_at_another_k_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    own_loop = import_module("own_loop")

    def made(K: int, seed: int) -> Pipeline:
        return Pipeline.of(own_loop.layers(), cross_entropy, own_loop.mini_batch(0), K=K, M=4, seed=seed)

    def trained(pipeline: Pipeline, *steps: int) -> list[float]:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        found = []
        for step in steps:
            found.append(pipeline.step(*own_loop.mini_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    one, other = made(1, 0), made(3, 0)
    losses = trained(one, 0, 1)
    other.load_state_dict(one.state_dict())
    other.steps_done = one.steps_done
    outputs = [[pair[0][0] for pair in each.forward(*own_loop.mini_batch(9))] for each in (one, other)]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True)) and len(outputs[0]) == 4
    assert trained(one, 2, 3) == trained(other, 2, 3) != losses
