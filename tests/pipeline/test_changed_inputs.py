"""Tests that a layer that changes its input, or a weight, in a forward is refused in the same words at every cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.buffers import BufferChanged, BufferGuard


def guarded(layer: nn.Module, name: str) -> BufferGuard:
    return BufferGuard(name, layer, layer)


@pytest.mark.parametrize("starts_cell", [True, False], ids=["at a cell's start", "inside a cell"])
def test_a_change_in_place_has_one_answer(starts_cell: bool) -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    given: Tensor = leaf if starts_cell else leaf * 2
    with pytest.raises(BufferChanged, match=r"layer 'relu' changes its input in place.*inplace=False"):
        guarded(nn.ReLU(inplace=True), "relu")(given)


def test_a_layer_may_change_what_it_has_made_itself() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    assert guarded(layer, "layer")(torch.randn(2, 3, requires_grad=True)).shape == (2, 3)


def test_a_layer_that_changes_a_weight_is_refused_by_name() -> None:
    """Replicas that see other examples would train different weights, without a word until the next resume."""
    with pytest.raises(BufferChanged, match="layer 'words' changes its parameter 'weight' in forward"):
        guarded(nn.Embedding(8, 4, max_norm=0.1), "words")(torch.arange(8))
