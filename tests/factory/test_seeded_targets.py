"""Tests that what a `_target_` makes depends on the seed alone: in every process, every run and every replica."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from gpipe_cli.factory.build import build_model
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.cell import build_layer


def weight_made_before_the_builders(seed: int) -> Tensor:
    builders = build_model({"_target_": "own_model.with_a_layer_twice"}, seed)
    (once,) = (builder for builder in builders if builder.name == "once")
    return next(once.build().parameters()).detach()


def test_weights_made_before_the_builders_follow_from_the_seed() -> None:
    torch.manual_seed(1)
    first = weight_made_before_the_builders(5)
    torch.manual_seed(2)
    assert torch.equal(first, weight_made_before_the_builders(5))
    assert not torch.equal(first, weight_made_before_the_builders(6))


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor([np.random.rand(), random.random()]))


def test_a_layer_may_draw_its_weights_from_numpy_or_python() -> None:
    layer = LayerBuilder("layer", FromNumpy)
    first, again = (build_layer(layer, 0, 1, torch.device("cpu")) for _ in range(2))
    assert torch.equal(next(first.parameters()), next(again.parameters()))
    assert not torch.equal(next(first.parameters()), next(build_layer(layer, 1, 1, torch.device("cpu")).parameters()))
