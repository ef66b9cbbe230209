"""Tests that BatchNorm's moving averages follow the whole mini-batch, for every M, K and remat policy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_models import build_all, engine_of, train_step
from torch import nn
from torch.nn import functional as F

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm, finish_batchnorm

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
    engine = engine_of(build_all(LAYERS), [2] if K == 1 else [1, 1])
    engine.loss = squares
    for cell in engine.cells.values():
        cell.train(True)
    batch: list[MicroBatch] = [((x,), (torch.zeros(len(x), 4),)) for x in EXAMPLES.tensor_split(M)]
    train_step(engine, "gpipe", remat, batch, weight=len(EXAMPLES))
    (norm,) = engine.cells[0].batchnorms
    finish_batchnorm([norm], None)
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


class NormAndReLU(nn.BatchNorm1d):
    """Adds an activation, as many libraries' classes do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_a_subclass_keeps_its_own_forward_and_the_users_module_stays_as_it_is() -> None:
    plain = NormAndReLU(6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(plain))
    deferred: Any = defer_batchnorm(model)
    assert model[1][0] is plain and isinstance(deferred[1][0], NormAndReLU)
    assert list(deferred.state_dict()) == list(model.state_dict())
    outputs = deferred(EXAMPLES)
    assert plain.num_batches_tracked == 0 and (plain.running_mean == 0).all()  # until the mini-batch has ended
    torch.testing.assert_close(outputs, model(EXAMPLES))
    assert outputs.min() == 0


def test_two_replicas_have_the_gradients_and_statistics_of_the_joined_mini_batch() -> None:
    assert run_workers("group_jobs:normalise", 2, {}) == []
