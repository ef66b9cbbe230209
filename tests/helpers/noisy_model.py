"""Defines layers, a loss and an optimizer that draw random numbers wherever one can."""

from functools import partial
from typing import Any

import torch
from own_model import Flatten
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder


def noisy(gradient: Tensor) -> Tensor:
    return gradient + torch.randn_like(gradient)


class Noise(torch.autograd.Function):
    """Passes values on, and gradients with noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return noisy(gradients[0])


class Layer(nn.Module):
    """Draws random numbers in backward, in a place of its own: in the path of its input, of a weight, in hooks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.fc, self.where = nn.Linear(3, 3), where
        if where == "parameter":
            self.fc.weight.register_hook(noisy)
            self.fc.bias.register_hook(noisy)
        if where == "module":
            self.fc.register_full_backward_pre_hook(lambda module, gradients: tuple(map(noisy, gradients)))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "weight":
            return nn.functional.linear(x, Noise.apply(self.fc.weight), Noise.apply(self.fc.bias))
        x = self.fc(x)
        y = torch.tanh(Noise.apply(x) if self.where == "input" else x)
        if self.where == "output" and x.requires_grad:
            x.register_hook(noisy)
        return y

    def auxiliary_loss(self, outputs: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        return Noise.apply(outputs).square().sum()


class Latent(nn.Linear):
    """Adds noise in training and evaluation, as Monte Carlo dropout and variational autoencoders do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.to(self.weight.dtype))
        return y + torch.randn_like(y)


def layers() -> list[LayerBuilder]:
    """Returns a classifier of 8×8 digits."""
    return [
        LayerBuilder("flatten", Flatten),
        LayerBuilder("encoder", partial(Latent, 192, 3)),
        *(LayerBuilder(where, partial(Layer, where)) for where in ("input", "parameter")),
        LayerBuilder("decoder", partial(Latent, 3, 10)),
    ]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(Noise.apply(outputs) + torch.randn_like(outputs), targets)


class Langevin(torch.optim.SGD):
    """Adds noise to every weight in an update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
