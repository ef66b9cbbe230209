"""Tests tied parameters: found without memory, whether layers share them or declare them, and counted once."""

from functools import partial
from typing import Any

import own_model
import pytest
import torch
from own_plan import planned
from torch import nn

from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder, Owner
from gpipe_cli.partition.cut import Cut, cut_model
from gpipe_cli.partition.model_profile import profile_layers
from gpipe_cli.partition.survey import survey

CPU = torch.device("cpu")
TWICE = (*own_model.DIGITS, "model._target_=own_model.with_a_layer_twice", "pipeline.K=2")


def builders(*builds: Any) -> list[LayerBuilder]:
    return [LayerBuilder(f"layer{i}", build) for i, build in enumerate(builds)]


def cut(sizes: str, cost: str = "flops") -> Cut:
    config = make_request([*TWICE, f"pipeline.partition={sizes}", f"pipeline.cost={cost}"]).settings.pipeline
    example = ((torch.zeros(1, 3, 8, 8, dtype=torch.uint8),), (torch.zeros(1),))
    layers = own_model.with_a_layer_twice()
    return cut_model(layers, config, 2, example, lambda: profile_layers(layers, example[0], CPU))


def test_a_module_in_a_closure_is_found_with_both_its_names() -> None:
    table = nn.Embedding(7, 8)
    ties = survey(builders(lambda: table, nn.ReLU, lambda: nn.Sequential(nn.ReLU(), table)))
    assert (ties.owners, ties.own[2]) == ([{}, {}, {"1.weight": Owner("layer0", "weight")}], [])


def declared(tied: dict[str, str], last: Any = nn.Linear) -> list[LayerBuilder]:
    table, middle = LayerBuilder("table", partial(nn.Embedding, 7, 8)), LayerBuilder("middle", nn.ReLU)
    return [table, middle, LayerBuilder("softmax", partial(last, 8, 7), tied=tied)]


def test_a_declared_tie_is_found_though_every_builder_makes_its_own() -> None:
    ties = survey(declared({"weight": "table.weight"}))
    assert (ties.owners, [*map(len, ties.own)]) == ([{}, {}, {"weight": Owner("table", "weight")}], [1, 0, 1])


class TwoNames(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.again = self.weight


def test_a_tie_within_a_layer_stays_the_layers_own() -> None:
    assert survey(builders(partial(TwoNames, 8, 8))).owners == [{}]


def frozen(*sizes: int) -> nn.Module:
    return nn.Linear(*sizes).requires_grad_(False)


@pytest.mark.parametrize(
    ("tied", "last", "message"),
    [
        ({"weight": "tabel.weight"}, nn.Linear, "'softmax': its parameter 'weight' is tied to 'tabel.weight', "),
        ({"wieght": "table.weight"}, nn.Linear, "'wieght' is tied to 'table.weight', but it has only weight, bias"),
        ({"bias": "table.weight"}, nn.Linear, r"one is float32\[7\] and the other float32\[7, 8\]: they must be"),
        ({"weight": "table.weight"}, frozen, r"one is float32\[7, 8\], frozen and the other float32\[7, 8\]"),
    ],
)
def test_a_declared_tie_that_cannot_be_is_refused_by_name(tied: dict[str, str], last: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        survey(declared(tied, last))


@pytest.mark.parametrize("cost", ["flops", "parameters", "profile"])
def test_a_run_counts_a_tied_parameter_once_where_its_owner_is(cost: str) -> None:
    together, apart = cut("[2,3]", cost), cut("[3,2]", cost)
    assert [row["parameters"] for row in together.table] == [1544, 162]
    assert [row["parameters"] for row in apart.table] == [1616, 90]
    assert together.parameters == apart.parameters == 1706


@pytest.mark.parametrize(("sizes", "copied"), [("[2,3]", 0), ("[3,2]", 72)])
def test_a_plan_counts_a_gradient_for_each_use_and_a_value_for_each_worker(sizes: str, copied: int) -> None:
    plan = planned(*TWICE, f"pipeline.partition={sizes}", "trainer.average=null", "optimizer=adam")
    kinds = ("weights", "gradients", "optimizer")
    weights, gradients, state = (sum(getattr(cell, kind) for cell in plan.cells) for kind in kinds)
    assert (plan.parameters, weights, gradients) == (1706, 4 * (1706 + copied), 4 * (1706 + 72))
    tensors = 2 + 2 + 2  # Adam keeps two numbers for each, and a step of 4 bytes for each tensor
    assert state == 8 * 1706 + 4 * tensors
