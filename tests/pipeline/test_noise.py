"""Tests random numbers outside of a layer's forward: the same for every K and schedule, and none of the program's."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from noisy_model import Layer, Noise
from torch import Tensor, nn

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.schedule.schedule import REMAT

X, Y = torch.linspace(-1, 1, 24).view(8, 3), torch.zeros(8, 3)
SETTINGS = [(K, remat) for K in (1, 2, 4) for remat in REMAT]


def made(K: int, where: str = "input", **others: Any) -> Pipeline:
    """Returns a pipeline of four layers and a loss that draw random numbers."""
    layers = [LayerBuilder(f"layer {number}", partial(Layer, where)) for number in range(4)]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (Noise.apply(outputs) - targets + torch.randn_like(targets)).square().mean()

    return Pipeline.of(layers, loss, (X[:2], Y[:2]), K=K, M=4, **others)


@pytest.mark.parametrize("where", ["input", "weight", "parameter", "module", "output"])
def test_noise_in_backward_and_in_the_loss_is_the_same_for_every_k_schedule_and_remat(where: str) -> None:
    def gradients(K: int, step: int = 0, **others: Any) -> Tensor:
        pipeline = made(K, where, **others)
        pipeline.steps_done = step
        losses.append(pipeline.step(X, Y))
        return torch.cat([parameter.grad.flatten() for parameter in pipeline.parameters()])

    losses: list[float] = []
    by_kind = []
    for kind in ("gpipe", "1f1b", "zero_bubble"):  # they add up the micro-batches in different orders
        first, *others = [gradients(K, schedule=kind, remat=remat) for K, remat in SETTINGS]
        assert all(torch.equal(other, first) for other in others), kind
        by_kind.append(first)
    assert len({*losses}) == 1
    assert all(torch.allclose(other, by_kind[0], atol=1e-5) for other in by_kind)
    assert not torch.allclose(gradients(1, step=1), by_kind[0], atol=1e-2)


def test_the_program_s_own_random_numbers_go_on_as_if_the_pipeline_drew_none() -> None:
    def drawn(use: Callable[[Pipeline], object]) -> Tensor:
        pipeline = made(2)
        torch.manual_seed(3)
        use(pipeline)
        return torch.rand(4)

    untouched = drawn(lambda pipeline: None)
    assert torch.equal(drawn(lambda pipeline: pipeline.step(X, Y)), untouched)
    assert torch.equal(drawn(lambda pipeline: pipeline.forward(X, Y)), untouched)
    assert torch.equal(drawn(lambda pipeline: made(4)), untouched)


class Fixed(nn.Module):
    """Promises to behave alike in all micro-batches of a step; draws with some probability."""

    graph_varies = False

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)) if self.drop.p else self.linear(x)


def test_layers_that_draw_nothing_are_not_seeded_again_in_a_step() -> None:
    drops = (0.0, 0.3, 0.0)
    layers = [LayerBuilder(f"layer {n}", partial(Fixed, drop)) for n, drop in enumerate(drops)]
    pipeline = Pipeline.of(layers, nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=4, remat="never")
    with patch.object(NoiseSource, "seed", side_effect=NoiseSource.seed, autospec=True) as seeded:
        pipeline.step(X, Y)
        assert seeded.call_count == 3 + 3 + 4 + 4  # first forwards; the second layer's others and backwards; the loss's
        pipeline.layers[0].module.drop.p = 0.3  # it is looked at in every step
        seeded.reset_mock()
        pipeline.step(X, Y)
    assert seeded.call_count == 3 + 2 * 3 + 2 * 4 + 4
