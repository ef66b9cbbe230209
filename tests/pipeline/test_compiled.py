"""Tests that compiled layers give the same bits for every cut, schedule and remat policy, and keep their names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from small_models import build_all, engine_of, gradients_of, mini_batch, small_model, train_step
from torch import Tensor, nn

from gpipe_cli.pipeline.cell import compile_layer

M = 4


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles without a compiler: graphs are traced and divided as usual, and run by torch's own kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def trained(cuts: list[int], kind: str, remat: str) -> dict[str, Tensor]:
    """Returns losses and gradients of two steps; ``cuts``: the number of layers of each cell."""
    engine = engine_of(build_all(small_model(batchnorm=True, dropout=0.3)), cuts, compiles=True)
    found: dict[str, Tensor] = {}
    for step in range(2):
        record = train_step(engine, kind, remat, mini_batch(0, 8, M), step)
        found |= {f"loss {step} {key}": loss for key, loss in record.losses.items()}
    return found | gradients_of(engine)


CASES = [([3, 4], "gpipe", "always"), ([1, 2, 2, 2], "1f1b", "except_last"), ([3, 4], "zero_bubble", "never")]


def assert_same_bits(cases: list[tuple[list[int], str, str]]) -> None:
    for cuts, kind, remat in cases:
        whole = trained([7], "gpipe" if kind == "gpipe" else "1f1b", "never")
        found = trained(cuts, kind, remat)
        assert found.keys() == whole.keys()
        assert [name for name in whole if not torch.equal(found[name], whole[name])] == [], (cuts, kind, remat)


@pytest.mark.slow(2)
def test_no_cut_and_no_schedule_changes_a_bit_of_real_kernels() -> None:
    assert_same_bits(CASES)


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
