"""Tests sums over a mini-batch and over replicas: BatchNorm's moving averages, and gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from small_models import build_all, engine_of, train_step
from torch import nn

from gpipe_cli.benchmarks.tables.steps import squared_loss
from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm, finish_batchnorm
from gpipe_cli.pipeline.gradients import fill_gradients, squared_norms

EXAMPLES = torch.randn(11, 6, generator=torch.Generator().manual_seed(3)) * 2 + 1
NORM = LayerBuilder("norm", partial(nn.BatchNorm1d, 6, momentum=0.3))
LAYERS = [NORM, LayerBuilder("linear", partial(nn.Linear, 6, 4))]


@pytest.mark.parametrize("M", [1, 2, 5])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("K", [1, 2])
def test_moving_averages_take_the_pooled_statistics_once_per_mini_batch(M: int, remat: str, K: int) -> None:
    engine = engine_of(build_all(LAYERS), [2] if K == 1 else [1, 1])
    engine.loss = squared_loss
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


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_have_the_gradients_and_statistics_of_the_joined_mini_batch(replicas: int) -> None:
    assert run_workers("group_jobs:normalise", replicas, {}) == []


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [3, pytest.param(4, marks=pytest.mark.slow)])  # two have one order alone
def test_the_bits_of_a_sum_over_replicas_do_not_depend_on_a_number_s_place_in_the_tensor(replicas: int) -> None:
    assert run_workers("group_jobs:sums", replicas, {}) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_all_parameters_have_the_bits_of_one_norm_each(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(), (0,), (3,), (257, 65), (9, 5, 4, 4), (100_003,)]
    gradients = [torch.randn(shape).to(dtype) for shape in shapes]
    gradients[4] = gradients[4].to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in (*gradients, gradients[2])]
    for parameter, gradient in zip(parameters, gradients, strict=False):  # the last has none
        parameter.grad = gradient
    one_each = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in gradients]
    assert torch.equal(squared_norms(parameters), torch.stack([*one_each, torch.tensor(0.0, dtype=torch.float64)]))


def test_a_sparse_gradient_counts_as_a_dense_one() -> None:
    tables = [nn.Embedding(5, 2, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        for ids in ([1, 1, 3], [3, 4, 4]):
            table(torch.tensor(ids)).square().sum().backward()
    parameters = [table.weight for table in tables]
    fill_gradients(parameters)
    assert parameters[0].grad is not None and parameters[1].grad is not None
    assert torch.allclose(parameters[0].grad, parameters[1].grad)
    assert squared_norms(parameters)[0] > 0
