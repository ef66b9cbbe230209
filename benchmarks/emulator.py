"""An emulated accelerator: layers that sleep as long as a device would compute, so K workers need no K devices.

A sleep ends late by tens of microseconds, and later when the processor is busy. That belongs to the emulation and not
to what is measured, so each overshoot is taken off the next sleep. What a layer costs the host beside its sleep
(Python, autograd) is not paid back; the plain loop's own efficiency says how much that is.
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
        speed: multiplies every sleep; 0 makes a warm-up step that takes no time.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self._overshoot = 0.0

    def reset(self) -> None:
        self._overshoot = 0.0

    def compute(self, seconds: float) -> None:
        """Takes ``seconds``, less what earlier sleeps took too long."""
        seconds = seconds * self.speed - self._overshoot
        if seconds <= 0:
            self._overshoot = -seconds
            return
        started = time.perf_counter()
        time.sleep(seconds)
        self._overshoot = time.perf_counter() - started - seconds


ACCELERATOR = Accelerator()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)  # torch.utils.checkpoint recomputes only for a graph that has saved something
        ctx.seconds = seconds
        ACCELERATOR.compute(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors
        ACCELERATOR.compute(ctx.seconds * BACKWARD)
        return gradients[0], gradients[0].sum(), None


class SleepingLayer(nn.Module):
    """x [b, WIDTH] to x + weight, in ``seconds``; its backward takes twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def forward_seconds(serial_seconds: float, M: int) -> float:
    """Of one layer and micro-batch, so that forward and backward of the whole mini-batch take ``serial_seconds``."""
    return serial_seconds / (LAYERS * M * (1 + BACKWARD))
