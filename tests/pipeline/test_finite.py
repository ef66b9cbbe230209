"""Tests that a step that is not finite is run again, and the layer that first gave such a value is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from in_backward import in_backward
from small_models import build_all, engine_of, mini_batch, small_model, token_loss, train_step
from torch import Tensor, nn

from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.cell import BuiltLayer
from gpipe_cli.pipeline.engine import Engine
from gpipe_cli.pipeline.finite import BACKWARD, DATA, FORWARD, LOSS, FiniteWatch, Origin, not_finite
from gpipe_cli.pipeline.messages.grouping import as_tensors, replace_tensors
from gpipe_cli.position import Position
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import REMAT

M, LAYERS = 3, 7
SIZES = {1: [7], 3: [2, 3, 2], 7: [1] * 7}
Fault = Callable[[nn.Module, Any, Any], Any]


def poisoned_back(x: Tensor) -> Tensor:
    return in_backward(x, lambda gradient: gradient * math.nan)


def engine_with(K: int, plant: Callable[[Engine], None]) -> Engine:
    engine = engine_of(build_all(small_model(batchnorm=True, dropout=0.3)), SIZES[K])
    plant(engine)
    return engine


def faulty(index: int, way: int, micro_batch: int) -> Callable[[Engine], None]:
    """Returns what makes a layer give NaN in one micro-batch, in its forward or its backward."""

    def plant(engine: Engine) -> None:
        def change(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            if engine.where.micro_batch != micro_batch:
                return None
            first = as_tensors(outputs)[0]
            bad = first * math.nan if way == FORWARD else poisoned_back(first)
            return replace_tensors(outputs, lambda tensor: bad if tensor is first else tensor)

        (layer,) = (layer for cell in engine.cells.values() for layer in cell.layers if layer.index == index)
        layer.module.register_forward_hook(change)

    return plant


def first_bad(engine: Engine, kind: str, remat: str, micro_batches: list[MicroBatch]) -> Origin | None:
    """Runs a step without watching and then again; the second must not change the first one's gradients."""
    weights = [parameter for cell in engine.cells.values() for _, parameter in cell.parameters()]
    runs = []
    found = FiniteWatch(0, engine.where)
    for watch in (None, found):
        train_step(engine, kind, remat, micro_batches, watch=watch)
        runs.append([parameter.grad for parameter in weights])
        for parameter in weights:
            parameter.grad = None
    for one, again in zip(*runs, strict=True):
        assert one is not None and again is not None and torch.equal(one.nan_to_num(), again.nan_to_num())
    return found.first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", SIZES)
def test_the_first_layer_is_named_at_every_k_schedule_and_policy(K: int, kind: str) -> None:
    others = list(KINDS).index(kind) % 2  # two kinds of schedule share the layers
    for way, index in product((FORWARD, BACKWARD), range(others, LAYERS, 2)):
        remat = REMAT[(way + index) % len(REMAT)]
        origin = first_bad(engine_with(K, faulty(index, way, 1)), kind, remat, mini_batch(0, 8, M))
        name = small_model(batchnorm=True)[index].name
        cell = next(k for k, indices in enumerate(cell_layers(SIZES[K])) if index in indices)
        assert origin is not None
        assert (origin.way, origin.micro_batch, origin.layer, origin.cell) == (way, 1, name, cell)


def loss_of(change: Callable[[Tensor], Tensor]) -> Callable[[Engine], None]:
    def plant(engine: Engine) -> None:
        def loss(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
            value, statistics = token_loss(outputs, targets)
            return (change(value) if engine.where.micro_batch == 1 else value), statistics

        engine.loss = loss

    return plant


def bad_weight(engine: Engine) -> None:
    (weight,) = (p for cell in engine.cells.values() for name, p in cell.parameters() if name == "mix_2.linear.weight")
    with torch.no_grad():
        weight[0, 0] = math.inf


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (loss_of(lambda value: value * math.nan), (FORWARD, 0, 1, LOSS, None, None, "value", "nan", None)),
        (loss_of(poisoned_back), (BACKWARD, 0, 1, -LOSS, None, None, "gradient of the input", "nan", None)),
    ],
    ids=["loss", "gradient of the loss"],
)
def test_the_task_s_loss_is_named(plant: Callable[[Engine], None], expected: tuple[Any, ...]) -> None:
    assert first_bad(engine_with(3, plant), "gpipe", "except_last", mini_batch(0, 8, M)) == expected


def test_a_weight_that_was_not_finite_before_is_named() -> None:
    origin = first_bad(engine_with(3, bad_weight), "gpipe", "except_last", mini_batch(0, 8, M))
    assert origin is not None and (origin.micro_batch, origin.layer, origin.weight) == (0, "mix_2", "linear.weight")


def test_data_that_are_not_finite_are_named() -> None:
    where = Position()
    where.enter(0, 2, "forward")
    watch = FiniteWatch(0, where)
    first = BuiltLayer(0, "first", nn.Identity())
    _, call, _ = watch.watched(0, (first, first.module, None))
    call(torch.tensor([1.0, math.inf]))
    assert watch.first == (FORWARD, 0, 2, DATA, None, None, "input 0", "inf", None)


def test_a_finite_step_has_no_such_value() -> None:
    for kind, remat in product(KINDS, REMAT):
        assert first_bad(engine_with(3, lambda engine: None), kind, remat, mini_batch(0, 8, M)) is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, math.nan, math.inf]), "nan"),
        (torch.tensor([1.0, -math.inf], dtype=torch.bfloat16), "inf"),
        (torch.tensor([1.0, math.inf], dtype=torch.float16), "inf"),
        (torch.tensor([complex(0, math.nan)]), "nan"),
        (torch.tensor([0.0, math.nan]).to_sparse(), "nan"),
        (torch.tensor([1, 2]), None),
        (torch.empty(0), None),
        (torch.full((2, 2), 1e38), None),
    ],
)
def test_nan_and_infinity_are_told_apart(tensor: Tensor, expected: str | None) -> None:
    assert not_finite(tensor) == expected
