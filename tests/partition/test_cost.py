"""Tests costs of layers: counted without memory, once for equal layers, and refused with the way out."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cost import count_forward, layer_costs
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.partition.survey import survey

BATCH = 4


def builders(*builds: Any, costs: tuple[float | None, ...] = ()) -> list[LayerBuilder]:
    declared = costs or (None,) * len(builds)
    return [LayerBuilder(f"layer{i}", b, c) for i, (b, c) in enumerate(zip(builds, declared, strict=True))]


def costs(layers: list[LayerBuilder], inputs: tuple[Tensor, ...], how: str) -> list[float]:
    return layer_costs(layers, survey(layers, inputs, count_forward), how)


def floats(*shape: int) -> tuple[Tensor]:
    return (torch.randn(*shape),)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Counted(nn.Module):
    """Counts how often it is built, and how often it runs."""

    built = run = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        Counted.built += 1
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        Counted.run += 1
        return self.linear(x)


def test_a_linear_layer_costs_its_products_and_its_outputs() -> None:
    assert costs(builders(partial(nn.Linear, 8, 16)), floats(BATCH, 8), "flops") == [2 * BATCH * 8 * 16 + BATCH * 16]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_scores_and_sums(causal: bool) -> None:
    (found,) = survey(builders(partial(Attention, 32, 4, causal)), floats(BATCH, 10, 32), count_forward).layers
    assert found.flops == 2 * BATCH * 10 * 32 * 4 * 32 + 2 * (2 * BATCH * 10 * 10 * 32)


def test_of_equal_layers_with_equal_inputs_few_are_built_and_run_however_many_there_are() -> None:
    Counted.built = Counted.run = 0
    layers = [LayerBuilder(str(i), partial(Counted, 8)) for i in range(3326)]
    found = survey(layers, floats(BATCH, 8), count_forward)
    assert (Counted.built, Counted.run) == (4, 2)  # the last layer may be cast otherwise
    assert found.names == [layer.name for layer in layers] and len(found.layers) == 3326


def test_parameters_count() -> None:
    assert costs(builders(partial(nn.Linear, 8, 16), nn.ReLU), floats(BATCH, 8), "parameters") == [144.0, 0.0]


def test_a_declared_cost_is_taken() -> None:
    assert costs(builders(nn.ReLU, nn.ReLU, costs=(1.0, 2.5)), floats(BATCH, 8), "declared") == [1.0, 2.5]


def test_a_layer_without_a_declared_cost_is_named() -> None:
    said = r"layer 'layer1' has no cost: give every layer a `cost`, or use pipeline\.cost=flops"
    with pytest.raises(CostError, match=said):
        costs(builders(nn.ReLU, nn.ReLU, costs=(1.0, None)), floats(BATCH, 8), "declared")


def test_a_layer_that_cannot_be_built_is_named() -> None:
    with pytest.raises(CostError, match="layer 'layer0' cannot be built: TypeError"):
        costs(builders(partial(nn.Linear, 8)), floats(BATCH, 8), "flops")


Complex = partial(nn.ParameterList, [torch.zeros(3, dtype=torch.complex64)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LazyLinear(4), r"'layer0': parameter 'weight' gets its shape only .* nn.Linear\(in_features"),
        (Complex, r"'layer0': parameter '0' is complex \(complex64\): .* torch.view_as_complex"),
    ],
    ids=["lazy", "complex"],
)
def test_lazy_and_complex_parameters_are_refused(build: Any, message: str) -> None:
    for how in ("flops", "parameters"):
        with pytest.raises(CostError, match=message):
            costs(builders(build), floats(2, 3), how)
