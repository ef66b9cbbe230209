"""Tests the engine as a library: examples/own_loop.py under torchrun computes gpipe-train's bits."""

from __future__ import annotations

import random
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from inline_run import train_inline
from processes import TORCHRUN, run, succeeded
from run_files import losses as losses_of
from torch.nn.functional import cross_entropy, mse_loss

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.distributed.step_message import BatchShape, PlanMessage
from gpipe_cli.distributed.world import World
from gpipe_cli.pipeline.cell import LayerFailed

EXAMPLES = Path(__file__).parents[2] / "examples"
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
    assert one.engine.meter.read_step() and one.engine.meter.spans == []  # times that nobody reads are not kept
    assert trained(one, 2, 3) == trained(other, 2, 3) != losses


class Frozen(torch.nn.Linear):
    """Begins without a gradient."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.requires_grad_(False)


def test_weights_unfrozen_between_two_steps_learn_at_every_k() -> None:
    x, y, found = torch.ones(4, 2), torch.zeros(4, 2), []
    for K in (1, 2):
        layers = [LayerBuilder("trunk", Frozen), LayerBuilder("head", partial(torch.nn.Linear, 2, 2))]
        pipeline = Pipeline.of(layers, mse_loss, (x[:2], y[:2]), K=K, M=2)
        pipeline.step(x, y)
        for parameter in pipeline.parameters():
            parameter.requires_grad_()
        pipeline.step(x, y)
        found.append([parameter.grad for parameter in pipeline.parameters()])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*found, strict=True))


class Short(torch.nn.Module):
    """Returns as many rows as the values say, or another type."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes == "type":
            return x.double() if x[0, 0] > 1 else x
        return x[: 1 if random.random() < 0.5 else 2] if self.training else x


@pytest.mark.parametrize(("changes", "said"), [("shape", r"float32\[[12], 2\]"), ("type", r"float64\[2, 2\]")])
@pytest.mark.parametrize("K", [1, 2])
def test_what_a_message_could_not_follow_is_refused_by_name_at_every_k(K: int, changes: str, said: str) -> None:
    x = torch.zeros(40, 2)
    x[2:] = 2
    layers = [LayerBuilder("short", partial(Short, changes)), LayerBuilder("end", torch.nn.Identity)]
    pipeline = Pipeline.of(layers, lambda o, t: o.mean(), (x[:2], x[:2]), K=K, M=20)
    with pytest.raises(LayerFailed, match=rf"layer 'short', micro-batch \d+: it passes on {said}, where .* before"):
        pipeline.step(x, x)


def test_targets_of_another_type_are_a_form_of_their_own() -> None:
    hard, soft = torch.tensor([0, 1]), torch.tensor([0.4, 0.6])
    cpu = torch.device("cpu")
    message = PlanMessage(World(0, 1, 1, cpu, cpu, None, None, None), BatchShape((2,), (1,)), 2)
    message.write_plan([((torch.ones(2, 2),), (targets,)) for targets in (hard, soft)], [2, 2])
    message.run()
    assert len(set(message.read_plan("train").signatures)) == 2
