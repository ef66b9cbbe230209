"""Tests that a process makes the weights of its own layers alone, with the values that the constructor draws."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_module import TiedTexts, mobile_net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_cli.layers import announce
from gpipe_cli.models.traced import recording
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.recording import NotRecordable, recorded, seeded

SEED, SIZE = 5, 64


class Drawn(nn.Module):
    """Draws in every way: cut off, from numpy and Python, in place of earlier values, into another tensor's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6)))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=random.uniform(0.1, 0.2))
        nn.init.trunc_normal_(self.blocks[1].weight)
        nn.init.orthogonal_(self.blocks[2].weight)
        with torch.no_grad():
            self.blocks[3].weight[0].zero_()
            self.blocks[4].bias.data = torch.from_numpy(np.random.rand(SIZE).astype("float32"))
        self.blocks[5].weight = self.blocks[0].weight
        self.register_buffer("table", torch.arange(4).float().exp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) + self.table.sum()


def copied() -> nn.Module:
    """Returns a module whose parts are copies, drawn anew after it."""
    return nn.Transformer(8, 2, 1, 1, 8)


@pytest.mark.parametrize("constructor", [Drawn, TiedTexts, mobile_net, copied])
def test_repeated_operations_give_the_constructors_values(constructor: Callable[[], nn.Module]) -> None:
    _, record = recorded(constructor, SEED, FakeTensorMode(allow_non_fake_inputs=True))
    with seeded(SEED):
        module = constructor()
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for names in (list(expected), list(expected)[2:3], list(expected)[-2:]):
        made = record.made(names)
        assert all(torch.equal(made[name], expected[name]) for name in names)


def test_a_worker_holds_its_own_weights_and_one_more_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8)))

    builders = layers(plain, [("float32", [2, SIZE])], SEED)
    held: list[int] = []
    repeat = recording._Operation.repeat

    def watched(self: Any, memory: dict[int, torch.UntypedStorage]) -> None:
        repeat(self, memory)
        held.append(sum(storage.nbytes() for storage in memory.values()))

    monkeypatch.setattr(recording._Operation, "repeat", watched)
    announce(builders[3:5])
    built = [builder.build() for builder in builders[3:5]]
    own = sum(4 * parameter.numel() for layer in built for parameter in layer.parameters())
    one = 4 * SIZE * SIZE
    assert own < 2.5 * one
    assert held[-1] < own + one / 2
    assert max(held) < own + 1.5 * one


def test_constructors_that_cannot_be_repeated_run_for_real() -> None:
    def seeds() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(4, 4)

    def looks() -> nn.Module:
        module = nn.Linear(4, 4)
        while module.weight[0, 0].item() < 0:
            module.reset_parameters()
        return module

    def loads() -> nn.Module:
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        weight, bias = torch.arange(16.0).view(4, 4), torch.ones(4)
        module.load_state_dict({"weight": weight, "bias": bias}, assign=True)
        return module

    for constructor in (seeds, looks, loads):
        with pytest.raises(NotRecordable):
            recorded(constructor, SEED, FakeTensorMode(allow_non_fake_inputs=True))
        (first, *others) = layers(constructor, [("float32", [2, 4])], SEED)
        with seeded(SEED):
            expected = constructor().weight
        weights = [w for builder in (first, *others) for w in builder.build().parameters() if w.dim() == 2]
        assert torch.equal(weights[0], expected)
