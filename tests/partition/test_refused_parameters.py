"""Tests that parameters that a pipeline cannot train are refused by name, whatever `pipeline.cost` is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.fake_layers import CostError

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
