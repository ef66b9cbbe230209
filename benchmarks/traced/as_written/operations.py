"""Defines modules whose operations are more than their values: in place, gradients, types, control."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.traced.as_written.given import WIDTH, given, series, vectors
from benchmarks.traced.as_written.weights import Net

# -- in place ----------------------------------------------------------------------------------------------------------


@given(vectors)
class FillsPart(Net):
    """Fills a part of its activations under no_grad."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        with torch.no_grad():
            h[:, :4] = 0.5
        return h.sin()


@given(vectors)
class ClampsActivations(Net):
    """Clamps its activations under no_grad, so that gradients pass as if it had not."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        with torch.no_grad():
            h.clamp_(-0.3, 0.3)
        return h.sin()


@given(vectors)
class ChangesViews(Net):
    """Changes views of its activations in place, with gradients."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        left, right = h[:, :4], h[:, 4:]
        left.mul_(2).add_(1)
        right[:, 1] = left[:, 0] * 3
        return h.sin()


# -- gradients ---------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """Turns a gradient round, by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


@given(vectors)
class GradientReversal(Net):
    """Puts a second branch behind a reversed gradient."""

    def middle(self, h: Tensor) -> Any:
        return torch.tanh(self.body(h)) + self.last(Reversed.apply(h, 0.3)).tanh()


@given(vectors)
class StraightThrough(Net):
    """Quantises by the nearest code, with the straight-through estimator written by detach."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)

    def middle(self, h: Tensor) -> Any:
        nearest = self.codes(torch.cdist(h, self.codes.weight).argmin(-1))
        return self.body(h + (nearest - h).detach()) + 0.1 * (nearest - h.detach())


@given(vectors)
class HooksActivation(Net):
    """Clips the gradient of an activation by a hook."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        return F.gelu(h)


@given(vectors)
class ForwardHooks(Net):
    """Takes features by a forward hook, and changes an output by another."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.stem.register_forward_hook(lambda module, given, output: self.features.update(stem=output))
        self.body.register_forward_hook(lambda module, given, output: output * 2)

    def middle(self, h: Tensor) -> Any:
        return self.body(h) + self.features["stem"]


@given(vectors)
class RecomputesItself(Net):
    """Recomputes a block by itself."""

    def middle(self, h: Tensor) -> Any:
        h = checkpoint(super().middle, h, use_reentrant=False)
        return checkpoint(self.body, h, use_reentrant=True)


@given(vectors)
class InnerGradient(Net):
    """Descends a gradient in forward, as meta-learning and energy models do."""

    def middle(self, h: Tensor) -> Any:
        with torch.enable_grad():
            h = h if h.requires_grad else h.requires_grad_()
            energy = self.body(h).square().sum()
            (slope,) = torch.autograd.grad(energy, h, create_graph=True)
        return h - 0.1 * slope


# -- types -------------------------------------------------------------------------------------------------------------


@given(vectors)
class HalfAccumulator(Net):
    """Adds up float32 in a float16 accumulator."""

    def middle(self, h: Tensor) -> Any:
        total = torch.zeros(h.shape, dtype=torch.float16)
        for _ in range(3):
            total += self.body(h)
        return total.float()


# -- control -----------------------------------------------------------------------------------------------------------


@given(vectors)
class BranchesOnTraining(Net):
    """Computes one part in training only, another in evaluation only."""

    def middle(self, h: Tensor) -> Any:
        if self.training:
            return F.gelu(self.body(h)) + 0.1 * self.last(h)
        return F.gelu(self.body(h)) * 0.5


@given(vectors)
class Conditional(Net):
    """Chooses by a value, with torch.cond."""

    def middle(self, h: Tensor) -> Any:
        return torch.cond(h.sum() > 0, lambda h: self.body(h).sin(), lambda h: self.last(h).cos(), (h,))


@given(vectors)
class BranchesOnValue(Net):
    """Chooses by a value, with if."""

    def middle(self, h: Tensor) -> Any:
        return self.body(h) if h.sum() > 0 else h


@given(series)
class MappedOverExamples(nn.Module):
    """Maps code for one example over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        def one(rows: Tensor) -> Any:
            h = torch.tanh(self.inner(rows))
            return (self.score(h).softmax(0) * h).sum(0)

        return self.head(vmap(one)(x))


@given(vectors)
class OwnGenerator(Net):
    """Adds the same noise in each call, from a generator that it seeds."""

    def middle(self, h: Tensor) -> Any:
        noise = torch.rand(h.shape[-1], generator=torch.Generator().manual_seed(5))
        return self.body(h + noise)
