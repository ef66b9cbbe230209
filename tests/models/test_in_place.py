"""Tests activations that work in place in a traced module: they do so in its layers, but change no layer's input."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.models.traced.layers import layers

SHAPE = [2, 3, 8, 8]


class Block(nn.Module):
    """Overwrites its input, which another block has made, and what its own modules return."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.one(torch.relu_(x)), inplace=True)
        out: Tensor = self.two(torch.relu_(self.norm(x)))
        return out


def three_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block()).train()


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


def test_activations_overwrite_what_their_layer_has_made_and_nothing_else() -> None:
    builders = layers(three_blocks, [("float32", SHAPE)], seed=5)
    torch.manual_seed(5)
    module, images = three_blocks(), torch.randn(SHAPE)
    expected = module(images.clone())
    expected.square().sum().backward()

    value, gradients = images, {}
    built = [builder.build() for builder in builders]
    with Calls() as calls:
        for layer in built:
            given, version = value, value._version
            value = layer(given)
            assert given._version == version
    value.square().sum().backward()
    assert torch.equal(value, expected)
    for builder, layer in zip(builders, built, strict=True):
        for name, parameter in layer.named_parameters():
            own = name if name in dict(module.named_parameters()) else f"{builder.name}.{name}"
            gradients[own] = parameter.grad
    assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in module.named_parameters())
    assert [calls.counts[f"aten::{name}"] for name in ("relu", "relu_", "hardtanh_")] == [3, 3, 3]
