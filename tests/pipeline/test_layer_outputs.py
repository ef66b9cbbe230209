"""Tests the outputs that a layer may return: how they reach the next layer, and the refusal of all others."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from inline_run import train_inline
from own_model import DIGITS
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.messages.boundary import BoundarySpec
from gpipe_cli.pipeline.messages.grouping import as_argument, as_tensors, grouping_of, replace_tensors

ONE, TWO = torch.zeros(1), torch.arange(2)


class Pair(NamedTuple):
    left: Tensor
    right: Any


@pytest.mark.parametrize(
    "value",
    [
        (ONE, None),
        (ONE, (TWO, ONE)),
        {"x": ONE, "mask": TWO},
        [ONE, {3: (TWO,)}, (), []],
        ({"x": {"tensor": ONE}}, "tensor", 7, 0.1, True, None),
    ],
    ids=str,
)
def test_groups_of_tensors_arrive_as_they_were(value: object) -> None:
    tensors = as_tensors(value)
    spec = BoundarySpec.from_json(BoundarySpec.of(tensors).to_json())
    assert spec.grouping == grouping_of(tensors) and spec.fits(tensors)
    assert str(as_argument(tensors)) == str(value) == str(replace_tensors(value, torch.clone))


@pytest.mark.parametrize(
    ("value", "argument"),
    [((ONE,), ONE), ([ONE, TWO], (ONE, TWO)), (Pair(ONE, TWO), (ONE, TWO)), ((), ())],
    ids=["one alone", "a list", "a named tuple", "nothing"],
)
def test_plain_tuples_need_no_grouping(value: object, argument: object) -> None:
    tensors = as_tensors(value)
    assert type(tensors) is tuple and grouping_of(tensors) is None
    assert str(as_argument(tensors)) == str(argument)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "NoneType"),
        ((None, 3), "tuple"),
        ((ONE, [ONE, {1}]), "set"),
        ((ONE, Pair(ONE, None)), "Pair"),
        ({"x": OrderedDict(y=ONE)}, "OrderedDict"),
        ({"x": ONE, (0, 1): ONE}, "dict"),
    ],
    ids=str,
)
def test_what_a_layer_may_not_return_is_named(value: object, found: str) -> None:
    with pytest.raises(TypeError, match=f"a layer returns a tensor, or tensors in tuples, .* not {found}: return"):
        as_tensors(value)


class Rows(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).view(len(images), 8, 24) / 255


class LastState(nn.Module):
    """Takes what `nn.LSTM` returns."""

    def forward(self, returned: tuple[Tensor, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        outputs, (hidden, cell) = returned
        return {"x": outputs[:, -1] + hidden[-1] + cell[0], "none": None}


class Logits(nn.Linear):
    def forward(self, named: dict[str, Any]) -> Tensor:
        return super().forward(named["x"])


def recurrent() -> list[LayerBuilder]:
    """Returns a model with `nn.LSTM` as it is."""
    return [
        LayerBuilder("rows", Rows),
        LayerBuilder("lstm", partial(nn.LSTM, 24, 8, num_layers=2, dropout=0.2, batch_first=True)),
        LayerBuilder("last_state", LastState),
        LayerBuilder("logits", partial(Logits, 8, 10)),
    ]


def test_an_lstm_as_it_is_trains_with_the_same_bits_at_every_k(tmp_path: Path) -> None:
    """Without a graph oneDNN's LSTM gives other bits than with one, and K decides which layers have a graph."""
    words = (*DIGITS, "model._target_=test_layer_outputs.recurrent", "trainer.steps=3", "pipeline.workers=1")
    found = []
    for K in (1, 2, 4):
        summary, events = train_inline(tmp_path / str(K), *words, f"pipeline.K={K}", "trainer.evaluate_first=false")
        found.append([summary["evaluation"], [e["loss"] for e in events if "loss" in e]])
    assert found[0] == found[1] == found[2]
