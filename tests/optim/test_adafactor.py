"""Tests Adafactor against numbers worked out by hand, against a plain loop, and against torch's where they agree."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.optim.adafactor import Adafactor


def weight(values: list[object]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: Adafactor, parameter: nn.Parameter, gradient: list[object]) -> None:
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()


# A vector, beta1 0.5, beta2 0.75, no eps, clip 1, lr 0.5, then 0.25; w begins at (1, 1).
# t = 1, g = (3, 4): V = 0.25·(9, 16) = (2.25, 4); u = (3/1.5, 4/2) = (2, 2), rms 2, clipped (1, 1);
#     m = 0.5·0.5·(1, 1) = (0.25, 0.25)
# t = 2, g = (0, 2): V = 0.75·(2.25, 4) + 0.25·(0, 4) = (1.6875, 4); u = (0, 1), rms √½, not clipped;
#     m = 0.5·(0.25, 0.25) + 0.5·0.25·(0, 1) = (0.125, 0.25)
def test_a_vector_by_hand() -> None:
    parameter = weight([1.0, 1.0])
    optimizer = Adafactor([parameter], lr=0.5, beta1=0.5, beta2=0.75, eps=0.0)
    step(optimizer, parameter, [3.0, 4.0])
    assert parameter.tolist() == pytest.approx([0.75, 0.75], rel=1e-14)
    optimizer.param_groups[0]["lr"] = 0.25
    step(optimizer, parameter, [0.0, 2.0])
    assert parameter.tolist() == pytest.approx([0.625, 0.5], rel=1e-14)


# Their squares are eps = 1e-30 alone, and the product of two of those is 0 in float32.
@pytest.mark.parametrize("gradient", [[[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]], ids=["all", "row, column"])
def test_zeros_in_the_first_gradient_of_a_matrix_move_nothing(gradient: list[list[float]]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.tensor(gradient)
    Adafactor([parameter], lr=0.5, beta1=0.0).step()
    assert parameter[parameter.grad == 0].tolist() == pytest.approx([1.0] * int((parameter.grad == 0).sum()), abs=0)
    assert bool(parameter.isfinite().all())


def test_the_squares_decay_as_one_minus_t_to_the_minus_exponent() -> None:
    parameter = weight([0.0])
    optimizer = Adafactor([parameter], lr=1.0, beta1=0.0, decay_exponent=0.5, eps=0.0, clip=None)
    for gradient in (1.0, 1.0, 1.0, 3.0):  # 1 − 4^−0.5 = ½: V = ½·1 + ½·9 = 5
        step(optimizer, parameter, [gradient])
    assert parameter.item() == pytest.approx(-3 - 3 / math.sqrt(5), rel=1e-14)


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1.0, 2.0]]], ids=["vector", "matrix"])
def test_only_the_first_step_makes_state(values: list[object]) -> None:
    parameter = weight(values)
    optimizer = Adafactor([parameter])
    step(optimizer, parameter, values)
    with patch("torch.zeros_like", side_effect=AssertionError):
        step(optimizer, parameter, values)


def test_without_momentum_it_is_torchs() -> None:
    """There updates are scaled by the parameter, and lr counts while it is below 1/√t."""
    torch.manual_seed(0)
    values: list[Tensor] = [torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    own = Adafactor(ours, lr=0.01, beta1=0.0, eps=0.0, parameter_scale=True, weight_decay=0.1)
    reference = torch.optim.Adafactor(theirs, lr=0.01, eps=(None, 1e-3), weight_decay=0.1)
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        own.step()
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=0.0)
