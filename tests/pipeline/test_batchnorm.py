"""Tests that BatchNorm's moving averages follow the whole mini-batch, for every M, K and remat policy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from schedule_rules import scheduled
from torch import nn
from torch.nn import functional as F

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm, finish_batchnorm
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Engine, StepInput
from gpipe_cli.pipeline.randomness import NoiseSource

CPU = torch.device("cpu")
EXAMPLES = torch.randn(11, 6, generator=torch.Generator().manual_seed(3)) * 2 + 1
LAYERS = [
    LayerBuilder("norm", partial(nn.BatchNorm1d, 6, momentum=0.3)),
    LayerBuilder("linear", partial(nn.Linear, 6, 4)),
]


def squares(outputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return F.mse_loss(outputs[0], targets[0], reduction="sum"), torch.zeros(0)


@pytest.mark.parametrize("M", [1, 2, 5])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("K", [1, 2])
def test_moving_averages_take_the_pooled_statistics_once_per_mini_batch(M: int, remat: str, K: int) -> None:
    built = [BuiltLayer(i, b.name, build_layer(b, i, 1, CPU)) for i, b in enumerate(LAYERS)]
    noise = NoiseSource(1, 0, CPU)
    cells = [Cell(0, built, noise)] if K == 1 else [Cell(k, [layer], noise) for k, layer in enumerate(built)]
    for cell in cells:
        cell.train(True)
    engine = Engine(cells, (0,) * K, None, squares, 1, CPU)
    micro_batches = [((x,), (torch.zeros(len(x), 4),)) for x in EXAMPLES.tensor_split(M)]
    step_input = StepInput(0, 1, tuple(len(inputs[0]) for inputs, _ in micro_batches), 1 / 11)
    engine.train_step(scheduled("gpipe", (0,) * K, M, remat)[0], step_input, micro_batches)
    finish_batchnorm([norm for cell in cells for norm in cell.batchnorms], None)
    (norm,) = cells[0].batchnorms
    torch.testing.assert_close(norm.running_mean, 0.3 * EXAMPLES.mean(0), rtol=1e-5, atol=1e-6)
    population = (EXAMPLES - EXAMPLES.mean(0)).square().mean(0)
    torch.testing.assert_close(norm.running_var, 0.7 + 0.3 * population, rtol=1e-5, atol=1e-6)
    assert norm.num_batches_tracked == 1


def test_a_batchnorm_in_two_places_is_updated_once() -> None:
    norm = nn.BatchNorm1d(6, momentum=1)
    layer = defer_batchnorm(nn.Sequential(norm, nn.Sequential(nn.ReLU(), norm)))
    between = nn.BatchNorm1d(6)(EXAMPLES).relu()
    layer(EXAMPLES)
    finish_batchnorm([part for part in layer.modules() if isinstance(part, DeferredBatchNorm)], None)
    assert norm.running_mean is not None and norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, torch.cat([EXAMPLES, between]).mean(0))
