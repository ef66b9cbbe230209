"""Tests that layers that look at values are counted on random ones, and no cut lies where a shape depends on values."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import checked, composed
from inline_run import same_bits_at_every_k
from own_model import DIGITS, Flatten
from torch import Tensor, nn

from gpipe_cli.config import PipelineConfig
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.partition.cost import count_forward
from gpipe_cli.partition.cut import cut_model
from gpipe_cli.partition.survey import survey
from gpipe_cli.planner.measure.layer_facts import measure_model

Rows = tuple[Tensor, Tensor, Tensor]  # the chosen rows, which rows they are, and all rows


class Experts(nn.Module):
    """Sends each row to one expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, None])
        return x + out


class Choose(nn.Module):
    def forward(self, x: Tensor) -> Rows:
        chosen = x.sum(-1) > 0
        return x[chosen], chosen, x


class Change(nn.Linear):
    def forward(self, given: Rows) -> Rows:  # type: ignore[override]  # takes rows
        rows, chosen, x = given
        return super().forward(rows).relu(), chosen, x


class PutBack(nn.Module):
    def forward(self, given: Rows) -> Tensor:
        rows, chosen, x = given
        out = x.clone()
        out[chosen] = rows
        return out


def layers(width: int = 8) -> list[LayerBuilder]:
    """Returns eight layers; behind `choose` and `change` the shapes depend on values."""
    return [
        LayerBuilder("flatten", Flatten),
        LayerBuilder("first", partial(nn.Linear, 192, width)),
        LayerBuilder("experts_0", partial(Experts, width, 3)),
        LayerBuilder("experts_1", partial(Experts, width, 3)),
        LayerBuilder("choose", Choose),
        LayerBuilder("change", partial(Change, width, width)),
        LayerBuilder("put_back", PutBack),
        LayerBuilder("last", partial(nn.Linear, width, 10)),
    ]


# -- costs and cuts --------------------------------------------------------------------------------------------------


IMAGES = torch.zeros(6, 3, 8, 8, dtype=torch.uint8, device="meta")
EXAMPLE: MicroBatch = ((IMAGES,), (torch.zeros(6, dtype=torch.long, device="meta"),))
JOINED = ["choose", "change"]


def cut(words: dict[str, Any]) -> tuple[list[int], list[str]]:
    said: list[str] = []
    usual = {**composed()["pipeline"], "cost": "flops", "M": 1, "K": 1, "remat": "never", "threads": 1}
    return cut_model(layers(), PipelineConfig(**{**usual, **words}, auto=[]), 1, EXAMPLE, None, said.append).sizes, said


def test_every_row_is_counted_once_whichever_expert_it_goes_to() -> None:
    found = survey(layers(), EXAMPLE[0], count_forward)
    assert [layer.flops for layer in found.layers[1:4]] == [2 * 6 * 192 * 8, *[2 * 6 * 8 * (3 + 8)] * 2]
    assert [found.names[index] for index in found.joined] == JOINED


def sum_of(outputs: Any, targets: Any) -> Any:
    return outputs[0].sum(), targets[0]


def test_the_planner_finds_the_same() -> None:
    found = measure_model(layers(), sum_of, EXAMPLE, checked().settings.precision, "cpu")
    assert found.joined == [4, 5]
    assert found.sizes[2] == 243 and found.layers[6].outputs[0].shape == (6, 8)


@pytest.mark.parametrize("cost", ["flops", "parameters"])
def test_the_cut_avoids_the_place_by_itself(cost: str) -> None:
    sizes, said = cut({"K": 6, "cost": cost})
    assert sizes == [1, 1, 1, 1, 3, 1]
    assert said == ["no cut behind choose, change: the shape of what is returned there depends on values"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"K": 7}, r"pipeline.K=7 but the model can be cut into 6 cells: .* choose, change .* use pipeline.K<=6"),
        ({"K": 2, "partition": [5, 3]}, r"pipeline.partition=\[5, 3\] cuts behind layer 'choose', where the shape"),
    ],
)
def test_a_cut_that_is_asked_for_there_is_refused_in_words(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cut(words)


def test_it_trains_with_the_same_bits_at_every_k(tmp_path: Path) -> None:
    words = (*DIGITS, "model._target_=test_drawn_values.layers", "trainer.steps=3")
    assert same_bits_at_every_k(tmp_path, (1, 6), *words)
