"""Weights are cast once a step; the bits are those of autocast, which casts them in every micro-batch."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_models import CPU, build_all, mini_batch, small_model, token_loss, weight_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.engine import Pipeline, StepInput
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.weight_casts import WeightCasts
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import schedule

M = 4


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def gradients(layers: list[BuiltLayer], kind: str, cuts: list[int], steps: int = 2) -> dict[str, Tensor]:
    """Returns the gradients of some steps together; ``cuts``: the number of layers of each cell."""
    noise, taken = NoiseSource(1, 0, CPU), iter(layers)
    cells = [Cell(k, [next(taken) for _ in range(size)], noise) for k, size in enumerate(cuts)]
    placement = (0,) * len(cells)
    engine = Pipeline(cells, placement, None, token_loss, 1, CPU, half)
    for step in range(steps):
        batch = mini_batch(step, 8, M)
        step_input = StepInput(step, steps, tuple(f"{step} {m}" for m in range(M)), 1 / weight_of(batch))
        engine.train_step(schedule(kind, placement, M, "except_last")[0], step_input, batch)
    return {name: p.grad for cell in cells for name, p in cell.parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_for_any_cut_and_schedule(kind: str) -> None:
    with patch.object(WeightCasts, "begin_step", lambda self: None):
        plain = gradients(build_all(small_model(dropout=0.3)), "gpipe" if kind == "gpipe" else "1f1b", [7])
    for cuts in ([7], [3, 4], [1, 2, 2, 2]):
        found = gradients(build_all(small_model(dropout=0.3)), kind, cuts)
        assert found.keys() == plain.keys()
        assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


class CastCounter(TorchDispatchMode):
    """Counts the casts of parameters to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.counts[id(args[0])] += 1
        return func(*args, **kwargs or {})


def test_a_weight_is_cast_once_in_a_step_of_many_micro_batches() -> None:
    layers = build_all(small_model())
    gradients(layers, "gpipe", [3, 4], steps=1)
    with CastCounter() as counter:  # the engine is new, so that its first step shows which weights are cast
        gradients(layers, "gpipe", [3, 4], steps=2)
    names = {id(p): f"{layer.name}.{n}" for layer in layers for n, p in layer.module.named_parameters()}
    first = 2 * M - 1  # forward and, but for the last micro-batch, recompute; and one that learns the boundaries
    often = {names[key]: count for key, count in counter.counts.items() if count > first + 2}
    assert counter.counts and not often


class Odd(nn.Module):
    """Uses one weight twice, one in float32, and one in a matrix product and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.wide, self.both, self.once = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(self.twice(self.twice(x)))
        with torch.autocast("cpu", enabled=False):
            x = self.wide(x.float())
        return self.both(x) + self.both.weight.sum()


def test_other_uses_of_a_weight_are_left_to_autocast() -> None:
    layer = Odd()
    casts = WeightCasts([layer])
    with half():
        with casts.used_on(CPU):
            expected = layer(torch.ones(2, 4))
        casts.begin_step()
        with casts.used_on(CPU):
            assert torch.equal(layer(torch.ones(2, 4)), expected)
            changed = [name for name, value in layer.named_parameters() if value.dtype is torch.bfloat16]
    assert changed == ["both.bias", "once.weight", "once.bias"]
    assert all(isinstance(value, nn.Parameter) for value in layer.parameters())


def test_a_weight_that_two_layers_share_is_left_to_autocast() -> None:
    shared = nn.Linear(4, 4)
    layers = [nn.Sequential(shared), nn.Sequential(shared)]
    casts = WeightCasts(layers)
    with half(), casts.used_on(CPU):
        layers[1](torch.ones(2, 4))
    casts.begin_step()
    assert casts.held == []


def test_without_autocast_nothing_is_cast() -> None:
    layer = nn.Linear(4, 4)
    casts = WeightCasts([layer])
    with casts.used_on(CPU):
        layer(torch.ones(2, 4))
    casts.begin_step()
    assert casts.held == []
