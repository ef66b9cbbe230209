"""An emulated accelerator: layers that sleep as long as a device would compute, so K workers need no K devices.

A sleep ends late by tens of microseconds, and later when the processor is busy; after it even a small addition is slow,
on a cold cache. That belongs to the emulation and not to what is measured, so whatever a layer took too long is taken
off the next sleep: in forward from the first line of the module to its last, in backward from the first line of its
node until its weight has its gradient. What stands between two layers (the module's call, autograd's way from node to
node, the engine, messages) is not paid back; the plain loop's own efficiency says how much the first two are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 48
WIDTH = 8  # of the boundary: small, since this is about waiting and not about bandwidth
BACKWARD = 2.0  # a backward takes so many forwards


class Accelerator:
    """The device of this process.

    Attributes:
        speed: multiplies every duration; 0 makes a warm-up step that takes no time.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self.reset()

    def reset(self) -> None:
        """Forgets what is still to be paid back."""
        self._overshoot = 0.0
        self._due = 0.0

    def begin(self, seconds: float) -> None:
        """The first line of something that takes ``seconds``; sleeps most of them."""
        now = time.perf_counter()
        self._due = now + seconds * self.speed - self._overshoot
        if self._due > now:
            time.sleep(self._due - now)

    def end(self) -> None:
        """Its last line."""
        self._overshoot = time.perf_counter() - self._due


ACCELERATOR = Accelerator()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)  # torch.utils.checkpoint recomputes only for a graph that has saved something
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ACCELERATOR.begin(ctx.seconds * BACKWARD)
        ACCELERATOR.end()
        _ = ctx.saved_tensors  # here torch.utils.checkpoint runs forward again: layers that take their own time
        ACCELERATOR.begin(0.0)
        return gradients[0], gradients[0].sum(), None  # ends when the weight has its gradient


class _Half(torch.autograd.Function):
    """Passes on its input at once, and the gradient after half of what a backward takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ACCELERATOR.begin(ctx.seconds * BACKWARD / 2)
        ACCELERATOR.end()
        return gradients[0], None


def _backward_has_ended(weight: Tensor) -> None:
    ACCELERATOR.end()


class SleepingLayer(nn.Module):
    """x [b, WIDTH] to x + weight, in ``seconds``; its backward takes twice as long.

    Args:
        divisible: the gradients of x and of the weight are two nodes of autograd that take half a backward each, for a
            schedule that computes them apart. Elsewhere one node is nearer to what a layer costs beside its sleep.
    """

    def __init__(self, seconds: float, divisible: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds, self.divisible = seconds, divisible
        if not divisible:
            tell = self.weight.register_post_accumulate_grad_hook
            tell(_backward_has_ended)  # type: ignore[no-untyped-call]  # torch's own

    def forward(self, x: Tensor) -> Tensor:
        ACCELERATOR.begin(self.seconds)
        try:  # torch.utils.checkpoint leaves the last layer that it runs again by an exception
            y: Tensor
            if self.divisible:
                y = _Half.apply(x, self.seconds) + _Half.apply(self.weight, self.seconds)
            else:
                y = _Sleep.apply(x, self.weight, self.seconds)
        finally:
            ACCELERATOR.end()
        return y


def forward_seconds(serial_seconds: float, M: int) -> float:
    """Of one layer and micro-batch, so that forward and backward of the whole mini-batch take ``serial_seconds``."""
    return serial_seconds / (LAYERS * M * (1 + BACKWARD))
