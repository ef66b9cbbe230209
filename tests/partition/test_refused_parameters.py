"""Tests that parameters that a pipeline cannot train are refused by name, whatever `pipeline.cost` is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.pipeline.gradients import fill_gradients, squared_norms

INPUTS = (torch.zeros(2, 3),)


def complex_layer() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return layer


@pytest.mark.parametrize("how", ["flops", "parameters"])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LazyLinear(4), r"layer 'odd': parameter 'weight' gets its shape only .* nn.Linear\(in_features"),
        (complex_layer, r"layer 'odd': parameter 'phase' is complex \(complex64\): .* torch.view_as_complex"),
    ],
    ids=["lazy", "complex"],
)
def test_lazy_and_complex_parameters_are_refused_by_name(build: type[nn.Module], message: str, how: str) -> None:
    with pytest.raises(CostError, match=message):
        layer_costs([LayerBuilder("odd", build)], INPUTS, how)


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
