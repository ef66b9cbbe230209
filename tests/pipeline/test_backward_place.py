"""Tests that a worker's place names the layer whose backward runs, for every schedule, cut and remat policy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_models import build_all, engine_of, mini_batch, small_model, token_loss, train_step
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline import compiled
from gpipe_cli.pipeline.cell import LayerFailed
from gpipe_cli.pipeline.engine import Pipeline
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import REMAT

M = 3
CUTS = ([7], [3, 4], [1, 2, 2, 2])
BACKWARDS = ("backward", "input_gradient", "weight_gradient")


def strays(engine: Pipeline, kind: str, remat: str) -> list[str]:
    """Runs a step; returns what each weight's gradient found as the place, where it is not its own layer's."""
    found, count, where = [], 0, engine.where

    def look(layer: str, cell: int, _gradient: Tensor) -> None:
        nonlocal count
        count += 1
        if (where.cell, where.layer) != (cell, layer) or where.instruction not in BACKWARDS:
            found.append(f"{layer}: {where.known()}")

    weights = [(w, layer.name, c.number) for c in engine.cells.values() for layer in c.layers for w in params(layer)]
    for weight, layer, cell in weights:
        weight.register_hook(partial(look, layer, cell))  # type: ignore[no-untyped-call]  # torch's own
    train_step(engine, kind, remat, mini_batch(0, 8, M))
    assert count >= M * len(weights)
    return found


def params(layer: object) -> list[nn.Parameter]:
    return list(layer.module.parameters())  # type: ignore[attr-defined]  # a BuiltLayer


@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_of_a_weight_is_made_in_its_own_layer(kind: str) -> None:
    for cuts in CUTS:
        for remat in REMAT:
            engine = engine_of(build_all(small_model(batchnorm=True, dropout=0.3)), cuts)
            assert strays(engine, kind, remat) == [], (cuts, remat)
            assert engine.where.known() == {}


def test_compiled_layers_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert strays(engine_of(build_all(small_model()), [3, 4], compiles=True), "zero_bubble", "except_last") == []
    torch._dynamo.reset()


class Breaking(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("broken")


class Broken(nn.Module):
    """Passes its inputs on, the first one through an operation whose backward fails."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return Breaking.apply(inputs[0]), *inputs[1:]  # type: ignore[no-untyped-call]  # torch's own


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_a_failing_backward_names_its_layer_also_between_layers_that_pass_tensors_on(kind: str) -> None:
    builders = small_model()
    builders[2] = LayerBuilder("broken", Broken)
    builders[4] = LayerBuilder("passing", nn.Identity)
    with pytest.raises(LayerFailed, match="cell 0, backward of layer 'broken', micro-batch 0"):
        train_step(engine_of(build_all(builders), [7]), kind, "never", mini_batch(0, 8, M))


def test_a_failing_backward_of_the_loss_is_named() -> None:
    def loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        value, statistics = token_loss(outputs, targets)
        return Breaking.apply(value), statistics  # type: ignore[no-untyped-call]  # torch's own

    engine = engine_of(build_all(small_model()), [3, 4])
    engine.loss = loss
    with pytest.raises(LayerFailed, match="cell 1, backward of the task's loss, micro-batch 2"):
        train_step(engine, "gpipe", "never", mini_batch(0, 8, M))
