"""Loads the weights of a run, or weights made elsewhere, into this worker's layers (paper, section 4: transfer)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ..layers import own_name
from ..pipeline.cell import Cell
from .files import CheckpointError, CheckpointInfo, shorten
from .foreign import Match, SavedTensor
from .layer_state import LayerState, load_layer, named_tensors, restore_layer, shapes_of


def open_run(info: CheckpointInfo, averages: bool) -> dict[str, SavedTensor]:
    """Returns weights and buffers of a checkpoint by their names in a plain state_dict; they are read later.

    Args:
        averages: take the moving averages where there are any.
    """
    load = lru_cache(1)(partial(load_layer, info))  # one layer at a time, checked by its checksum
    found: dict[str, SavedTensor] = {}
    for layer, file in info.layers.items():
        shapes = shapes_of(info, layer)
        shapes |= {name: found[own_name(*owner)].shape for name, owner in file.tied.items()}
        for name, shape in shapes.items():
            found[own_name(layer, name)] = SavedTensor(shape, partial(_read, load, layer, name, averages))
    return found


def _read(load: Callable[[str], LayerState], layer: str, name: str, averages: bool) -> Tensor:
    state = load(layer)
    return state.averaged[name] if averages else {**state.weights, **state.buffers}[name]


def named_shapes(cells: Sequence[Cell]) -> dict[str, list[int]]:
    """Returns the shapes of this worker's parameters and persistent buffers by their names in a plain state_dict."""
    layers = [layer for cell in cells for layer in cell.layers]
    return {
        own_name(layer.name, name): list(tensor.shape)
        for layer in layers
        for tensors in named_tensors(layer.module)
        for name, tensor in tensors.items()
    }


def shared_names(cells: Sequence[Cell]) -> list[list[str]]:
    """Returns these names of each parameter that a layer of this worker has under several."""
    groups: dict[int, list[str]] = {}
    for layer in (layer for cell in cells for layer in cell.layers):
        for name, parameter in named_tensors(layer.module)[0].items():
            groups.setdefault(id(parameter), []).append(own_name(layer.name, name))
    return [names for names in groups.values() if len(names) > 1]


@torch.no_grad()
def load_matched(cells: Sequence[Cell], saved: Mapping[str, SavedTensor], match: Match, path: Path) -> list[str]:
    """Loads weights into this worker's layers by their names; floating-point values take the types of the model.

    Returns:
        The types that were converted, as "bfloat16 to float32".

    Raises:
        CheckpointError: a file cannot be read, or a value cannot become one of the model's type.
    """
    converted: dict[str, None] = {}
    for layer in (layer for cell in cells for layer in cell.layers):
        for tensors in named_tensors(layer.module):
            for name, own in tensors.items():
                if (full := own_name(layer.name, name)) in match.saved:
                    value = saved[match.saved[full]].read()
                    if value.dtype != own.dtype:
                        if not (value.is_floating_point() and own.is_floating_point()):
                            raise CheckpointError(f"{path}: {full} is {value.dtype}, this model's {own.dtype}")
                        converted[f"{value.dtype} to {own.dtype}".replace("torch.", "")] = None
                    own.copy_(value)
    return list(converted)


def load_same_model(info: CheckpointInfo, cells: Sequence[Cell], model: Collection[str], averages: bool) -> None:
    """Loads weights and buffers of a checkpoint of this very model into this worker's layers.

    Args:
        model: the names of all layers.
        averages: take the moving averages where there are any.

    Raises:
        CheckpointError: the model is another one, or a file is damaged.
    """
    if differing := info.layers.keys() ^ set(model):
        raise CheckpointError(
            f"{info.path} was made with another model, with other layers: {shorten(sorted(differing))}: give the model "
            "settings (model.*) it was made with"
        )
    for layer in (layer for cell in cells for layer in cell.layers):
        saved = load_layer(info, layer.name)
        better = saved.averages if averages else {}
        weights, buffers = (
            {name: better.get(name, tensor) for name, tensor in tensors.items()}
            for tensors in (saved.weights, saved.buffers)
        )
        restore_layer(layer.name, layer.module, None, LayerState(weights, buffers))
