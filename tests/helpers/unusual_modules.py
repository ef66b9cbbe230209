"""Defines modules with code that torch.export alone would lose, keep wrong or refuse."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Perceptron(nn.Module):
    """Has four linear layers; those below change what it does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.third(self.changed(self.first(x)))))

    def changed(self, h: Tensor) -> Tensor:
        return F.gelu(self.second(h))


# -- these give the same bits ------------------------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    """Has a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    """Takes a number and a size beside tensors, returns two tensors and None, and turns a gradient round."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, examples: int, scale: float) -> tuple[Tensor, Tensor, None]:
        return x * scale * examples, weight.view_as(weight), None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scale = inputs[2] * inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_weight: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
        return -gradient * ctx.scale, 3 * of_weight, None, None


class OwnBackward(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        h, weight, _ = Scaled.apply(Sign.apply(h), self.second.weight, h.shape[0], 0.5)
        return checkpoint(F.linear, h, weight, use_reentrant=True)


class Recurrent(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def changed(self, h: Tensor) -> Tensor:
        return self.second(self.lstm(torch.stack([h, -h], 1))[0][:, 1])


class HalfInside(Perceptron):
    """Computes a part in bfloat16, with weights that are made of others, and with tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.second = parametrizations.weight_norm(self.second)
        self.scales = [torch.rand(WIDTH), torch.rand(WIDTH)]

    def changed(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.second(h * self.scales[0])
        return h.float() * self.scales[1]


# -- these are refused -------------------------------------------------------------------------------------------------


class HooksModule(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda module, before, after: (-before[0],))


class DrawsInPython(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return self.second(h) if random.random() < 0.5 else h


class ChangesParameter(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class EvenOnly(Perceptron):
    """Branches on the number of examples."""

    def changed(self, h: Tensor) -> Tensor:
        return self.second(h) if h.shape[0] % 2 == 0 else h


def scripted() -> nn.Module:
    return torch.jit.script(Perceptron())


def a_list() -> list[nn.Module]:
    return [Perceptron()]
