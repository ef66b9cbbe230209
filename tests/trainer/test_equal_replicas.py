"""Tests that replicas with different weights are refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import build_all, small_model

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.trainer.training_assembly import fingerprint, require_equal_replicas

CPU = torch.device("cpu")


def marks(change: int | None) -> Any:
    """Returns what the only worker of a replica sends; the weights of layer number ``change`` differ."""
    layers = build_all(small_model(batchnorm=True))
    if change is not None:
        with torch.no_grad():
            next(layers[change].module.parameters()).view(-1)[0] += 1e-6
    cell = Cell(0, layers, NoiseSource(1, 0, CPU))
    return cell, [(layer.name, fingerprint(layer.module)) for layer in cell.layers]


def check(change: int | None) -> None:
    cell, own = marks(None)
    world = SimpleNamespace(replicas=2, workers=1, all_gather=lambda value: [own, marks(change)[1]])
    require_equal_replicas(cast(Any, SimpleNamespace(world=world, layers=cell.layers)))


def test_equal_replicas_may_train() -> None:
    check(None)


def test_the_first_layer_that_differs_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"layer 'mix_2' has other weights on replica 1 than on replica 0"):
        check(4)
