"""Tests a backward in two halves: it has the bits of a whole one, and the weights' half is really left for later."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_cli.pipeline.halves import backward_of_inputs
from gpipe_cli.pipeline.messages.boundary import as_tensors


def gradients(module: nn.Module, inputs: Sequence[Tensor], in_halves: bool) -> tuple[list[Tensor | None], list[int]]:
    """Returns the gradients of inputs and parameters after two micro-batches, and how many parameters waited."""
    module.zero_grad()
    found: list[Tensor | None] = []
    waited = []
    for micro_batch in range(2):
        leaves = [(tensor + micro_batch).detach().requires_grad_() for tensor in inputs]
        torch.manual_seed(micro_batch)
        roots = [root for root in as_tensors(module(*leaves)) if root.requires_grad]
        seeds = [torch.randn(root.shape) for root in roots]
        if in_halves:
            rest = backward_of_inputs(roots, seeds, leaves)
            found += [leaf.grad for leaf in leaves]
            waited.append(len(rest))
            rest.run()
        else:
            torch.autograd.backward(roots, seeds)
            found += [leaf.grad for leaf in leaves]
    return [*found, *(parameter.grad for parameter in module.parameters())], waited


def same(module: nn.Module, *inputs: Tensor) -> int:
    """Checks that halves and whole agree in every bit; returns how many parameters waited."""
    whole, _ = gradients(module, inputs, in_halves=False)
    whole = [None if gradient is None else gradient.clone() for gradient in whole]
    halves, waited = gradients(module, inputs, in_halves=True)
    for number, (one, other) in enumerate(zip(halves, whole, strict=True)):
        assert (one is None) == (other is None), number
        assert one is None or (other is not None and torch.equal(one, other)), number
    return waited[0]


class Function(nn.Module):
    """Makes a module from a function of x and the parameters w, v and, of one dimension, b."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width, width))
        self.b = nn.Parameter(torch.randn(width))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w, self.v, self.b)


class Product(torch.autograd.Function):
    """Computes both gradients at once, as a custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return arrived[0] @ w.T, x.T @ arrived[0]


def doubled_on_the_way(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    y.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]  # torch's own
    return F.linear(y.tanh(), v)


def checkpointed(reentrant: bool, x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Any:
    return checkpoint(lambda y: F.linear(F.dropout(y, 0.5) @ w, v, b), x, use_reentrant=reentrant)


# name: (what the layer computes, how many of its three parameters can wait)
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "two linear maps": (lambda x, w, v, b: F.linear(F.linear(x, w, b).tanh(), v), 3),
    "one weight used twice in a row": (lambda x, w, v, b: F.linear(F.linear(F.linear(x, w, b), w), v), 2),
    "one transposed weight used twice": (lambda x, w, v, b: (lambda t: (x @ t).tanh() @ t @ v + b)(w.T), 2),
    "a residual": (lambda x, w, v, b: x + F.linear(F.layer_norm(x, (4,), b), w) @ v, 3),
    "an output without input": (lambda x, w, v, b: (F.linear(x, w, b), v.exp()), 2),
    "the input as output": (lambda x, w, v, b: (x, F.linear(x, w, b), x.detach()), 2),
    "a custom function": (lambda x, w, v, b: F.linear(Product.apply(x, w), v, b), 2),
    "a hook on the way": (doubled_on_the_way, 3),
    "checkpointed": (partial(checkpointed, False), 3),
    "checkpointed, re-entrant": (partial(checkpointed, True), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_the_same_gradients_in_halves_as_in_one(name: str) -> None:
    torch.manual_seed(0)
    function, can_wait = CASES[name]
    assert same(Function(function), torch.randn(5, 4)) == can_wait


def test_the_second_half_computes_no_gradient_of_an_input_again() -> None:
    calls = []
    module = Function(lambda x, w, v, b: F.linear(x, w, b))
    x = torch.randn(2, 4, requires_grad=True)
    middle = x * 2
    middle.grad_fn.register_hook(lambda made, arrived: calls.append(made))  # type: ignore[union-attr]
    rest = backward_of_inputs([module(middle)], [torch.ones(2, 4)], [x])
    assert (len(calls), module.w.grad) == (1, None)
    rest.run()
    assert (len(calls), module.w.grad is None) == (1, False)
