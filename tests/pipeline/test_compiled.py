"""Tests compiled layers and weights cast once a step: the same bits for every cut, schedule and remat policy."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_tools import changed
from small_models import build_all, engine_of, gradients_of, train_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.subject import mini_batch, small_model
from gpipe_cli.pipeline.cell import BuiltLayer, compile_layer
from gpipe_cli.pipeline.weight_casts import WeightCasts
from gpipe_cli.schedule.orders import KINDS

M = 4


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles without a compiler: graphs are traced and divided as usual, and run by torch's own kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def trained(
    layers: list[BuiltLayer], cuts: list[int], kind: str, remat: str = "except_last", steps: int = 2, **how: Any
) -> dict[str, Tensor]:
    """Returns losses and gradients of some steps; ``cuts``: the number of layers of each cell."""
    engine = engine_of(layers, cuts, **how)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        record = train_step(engine, kind, remat, mini_batch(2 * step, 8, M), step)  # of one width
        found |= {f"loss {step} {key}": loss for key, loss in record.losses.items()}
    return found | gradients_of(engine)


CASES = [([3, 4], "gpipe", "always"), ([1, 2, 2, 2], "1f1b", "except_last"), ([3, 4], "zero_bubble", "never")]


@pytest.mark.slow(2)
def test_no_cut_and_no_schedule_changes_a_bit_of_real_kernels() -> None:
    for cuts, kind, remat in CASES:
        layers = [build_all(small_model(batchnorm=True, dropout=0.3)) for _ in range(2)]
        whole = trained(layers[0], [7], "gpipe" if kind == "gpipe" else "1f1b", "never", compiles=True)
        assert not changed(trained(layers[1], cuts, kind, remat, compiles=True), whole), (cuts, kind, remat)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_kernel_is_chosen_by_its_time_where_bits_are_promised(
    deterministic: bool, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with torch._inductor.config.patch(deterministic=False):  # type: ignore[attr-defined]  # made at its import
        compile_layer(nn.Linear(3, 3))
        assert torch._inductor.config.deterministic == deterministic


def test_a_layer_runs_compiled_under_its_old_names(traced: None) -> None:
    seen: list[str] = []

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append("compiled" if torch.compiler.is_compiling() else "not")
            return super().forward(x) * 2

    layer = Scaled(3, 3)
    names, expected = list(layer.state_dict()), layer(torch.ones(2, 3))
    assert compile_layer(layer)
    assert torch.equal(layer(torch.ones(2, 3)), expected)
    assert seen == ["not", "compiled"]
    assert list(layer.state_dict()) == names


def test_a_layer_with_begin_step_stays_as_it_is() -> None:
    class Stepping(nn.Linear):
        def begin_step(self, step: int, steps: int) -> None:
            pass

    assert not compile_layer(nn.Sequential(Stepping(3, 3)))


# -- weights cast once -----------------------------------------------------------------------------------------------


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_for_any_cut_and_schedule(kind: str) -> None:
    with patch.object(WeightCasts, "used", lambda *_: nullcontext()):
        plain = trained(build_all(small_model(dropout=0.3)), [7], "gpipe" if kind == "gpipe" else "1f1b", autocast=half)
    for cuts in ([7], [3, 4], [1, 2, 2, 2]):
        assert not changed(trained(build_all(small_model(dropout=0.3)), cuts, kind, autocast=half), plain)


class CastCounter(TorchDispatchMode):
    """Counts the casts of parameters to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.counts[id(args[0])] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("alike", [False, True])
def test_a_weight_is_cast_once_in_a_step_of_many_micro_batches(alike: bool) -> None:
    """Beside autocast's own, for the first micro-batch: of the run, where layers use their weights alike in all."""
    layers = build_all(small_model())
    for module in (layer.module for layer in layers if alike):
        vars(module)["graph_varies"] = False
    with CastCounter() as counter:
        found = trained(layers, [3, 4], "gpipe", steps=3, autocast=half)
    assert set(counter.counts.values()) == {3 + (1 if alike else 3)}
    assert not changed(found, trained(build_all(small_model()), [7], "gpipe", steps=3, autocast=half))


class Odd(nn.Module):
    """Uses one weight twice, one in float32, one in a matrix product and as it is, and one for its type."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.wide, self.both, self.once, self.typed = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.typed(x.to(self.typed.weight.dtype) / 3)
        x = self.once(self.twice(self.twice(x)))
        with torch.autocast("cpu", enabled=False):
            x = self.wide(x.float())
        return self.both(x) + self.both.weight.sum()


def test_other_uses_of_a_weight_are_left_to_autocast() -> None:
    layer = Odd()
    casts = WeightCasts([layer])
    with half():
        with casts.used():
            expected = layer(torch.ones(2, 4))
        with casts.used():
            assert torch.equal(layer(torch.ones(2, 4)), expected)
            changed = [name for name, value in layer.named_parameters() if value.dtype is torch.bfloat16]
    assert changed == ["both.bias", "once.weight", "once.bias", "typed.bias"]
    assert all(isinstance(value, nn.Parameter) for value in layer.parameters())


def test_a_weight_that_two_layers_share_is_left_to_autocast() -> None:
    shared = nn.Linear(4, 4)
    layers = [nn.Sequential(shared), nn.Sequential(shared)]
    casts = WeightCasts(layers)
    with half(), casts.used():
        layers[1](torch.ones(2, 4))
    assert casts.held == []
