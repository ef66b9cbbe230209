"""Tests sums of gradients over replicas, in one order for every number, and gradients that are sparse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.pipeline.gradients import fill_gradients, squared_norms


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
