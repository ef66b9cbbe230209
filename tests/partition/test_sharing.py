"""Weights that several layers hold: found without memory, refused across a cut, counted once within a cell."""

from __future__ import annotations

from functools import partial
from typing import Any

import own_model
import pytest
import torch
from own_plan import planned
from torch import nn

from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.cut import Cut, cut_model
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.profile import profile_layers
from gpipe_cli.partition.sharing import find_sharing
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.randomness import NoiseSource

CPU = torch.device("cpu")
TWICE = (*own_model.DIGITS, "model._target_=own_model.with_a_layer_twice", "pipeline.K=2")


def builders(*builds: Any) -> list[LayerBuilder]:
    return [LayerBuilder(f"layer{i}", build) for i, build in enumerate(builds)]


def cut(sizes: str, cost: str = "flops") -> Cut:
    config = make_request([*TWICE, f"pipeline.partition={sizes}", f"pipeline.cost={cost}"]).settings.pipeline
    example = ((torch.zeros(1, 3, 8, 8, dtype=torch.uint8),), (torch.zeros(1),))
    layers = own_model.with_a_layer_twice()
    return cut_model(layers, config, 2, example, lambda: profile_layers(layers, example[0], CPU).costs)


def test_fresh_modules_share_nothing() -> None:
    sharing = find_sharing(builders(*[partial(nn.Linear, 8, 8)] * 3, lambda: nn.Linear(8, 8)))
    assert (sharing.pairs, sharing.repeated) == ([], [{}] * 4)


def test_a_module_in_a_closure_is_found_with_both_its_names() -> None:
    table = nn.Embedding(7, 8)
    sharing = find_sharing(builders(lambda: table, nn.ReLU, lambda: nn.Sequential(nn.ReLU(), table)))
    assert [(pair.layers, pair.parameters) for pair in sharing.pairs] == [
        (("layer0", "layer2"), ("weight", "1.weight"))
    ]
    assert sharing.repeated == [{}, {}, {"1.weight": 56}]


def test_a_module_in_equal_partials_is_found_and_repeats_in_each_but_the_first() -> None:
    sharing = find_sharing(builders(*[partial(nn.Sequential, nn.Linear(8, 8))] * 4))
    assert [pair.parameters for pair in sharing.pairs] == [("0.weight", "0.weight"), ("0.bias", "0.bias")]
    assert sharing.repeated == [{}, *[{"0.weight": 64, "0.bias": 8}] * 3]


def test_one_parameter_tied_into_two_modules_is_found() -> None:
    weight = nn.Parameter(torch.zeros(8, 8))

    def tied() -> nn.Module:
        layer = nn.Linear(8, 8)
        layer.weight = weight
        return layer

    sharing = find_sharing(builders(tied, tied))
    assert [pair.parameters for pair in sharing.pairs] == [("weight", "weight")]
    assert sharing.repeated == [{}, {"weight": 64}]


def test_a_cut_between_two_holders_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'once' and 'again' share the weight 'weight' but lie in different"):
        cut("[3,2]")


@pytest.mark.parametrize("cost", ["flops", "parameters", "profile"])
def test_a_run_counts_what_a_cell_holds_twice_once(cost: str) -> None:
    layers = own_model.with_a_layer_twice()
    built = [BuiltLayer(index, layers[index].name, build_layer(layers[index], index, 1, CPU)) for index in (2, 3, 4)]
    held = sum(parameter.numel() for _, parameter in Cell(1, built, NoiseSource(0, 0, CPU)).parameters())
    found = cut("[2,3]", cost)
    assert [row["parameters"] for row in found.table] == [1544, held]
    assert found.parameters == 1706 == 1544 + held


def test_a_plan_counts_it_once_and_so_all_that_comes_with_it() -> None:
    plan = planned(*TWICE, "pipeline.partition=[2,3]", "trainer.average=null", "optimizer=adam")
    assert (plan.parameters, plan.weight_bytes, plan.gradient_bytes) == (1706, 4 * 1706, 4 * 1706)
    tensors = 2 + 2 + 2  # Adam keeps two numbers for each, and a step of 4 bytes for each tensor
    assert plan.optimizer_bytes == 8 * 1706 + 4 * tensors
