"""Takes the weights of another run for a new one, but for layers that begin anew (paper, section 4: transfer)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..layers import own_name
from ..pipeline.cell import Cell
from .files import CheckpointError, CheckpointInfo, is_named, shorten
from .foreign import Match, SavedTensor
from .layer_state import LayerState, load_layer, named_tensors, restore_layer


def require_same_model(info: CheckpointInfo, model: Mapping[str, Sequence[str]], left_out: Sequence[str]) -> None:
    """Refuses layers and parameters that only one side has, unless they are left out. Every worker finds the same.

    Args:
        info: the checkpoint whose weights are wanted.
        model: parameter names of every layer of the new model, in order.
        left_out: `checkpoint.init_except`.

    Raises:
        CheckpointError: it names what does not fit, and what to type.
    """
    here, there = _parameters(model), _parameters_of(info)
    lacking = [name for name in sorted(here - there) if not is_named(name, left_out)]
    unknown = [name for name in sorted(there - here) if not is_named(name, left_out)]
    faults = [f"not in the checkpoint: {shorten(lacking)}"] if lacking else []
    faults += [f"not in this model: {shorten(unknown)}"] if unknown else []
    if faults:
        raise CheckpointError(
            f"{info.path} was made with another model; {'; '.join(faults)}. Give the model settings (model.*) it was "
            f"made with, or name what may differ, as {_advice([*left_out, _layer_of([*lacking, *unknown][0], model)])}"
        )


def names_on_both_sides(info: CheckpointInfo, model: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the full names of the parameters of the model and of the checkpoint."""
    return _parameters(model) | _parameters_of(info)


def load_weights(info: CheckpointInfo, cells: Sequence[Cell], left_out: Sequence[str], averages: bool) -> list[str]:
    """Loads weights and buffers of a checkpoint into this worker's layers; optimizer state is not loaded.

    Args:
        left_out: patterns of layers and of `<layer>.<parameter or buffer>` that stay as they are.
        averages: take the moving averages where there are any.

    Returns:
        The layers in which something was left out.

    Raises:
        CheckpointError: a shape or type differs, or a file is damaged; it names the layer.
    """
    new = []
    for layer in (layer for cell in cells for layer in cell.layers):
        if is_named(layer.name, left_out):
            new.append(layer.name)
            continue
        weights, buffers = named_tensors(layer.module)
        saved = load_layer(info, layer.name)
        better = saved.averages if averages else {}
        state = LayerState(
            _chosen(layer.name, weights, saved.weights, better, left_out),
            _chosen(layer.name, buffers, saved.buffers, better, left_out),
        )
        if any(is_named(f"{layer.name}.{name}", left_out) for name in (*weights, *buffers)):
            new.append(layer.name)
        try:
            restore_layer(layer.name, layer.module, None, state)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. To begin with new values there: {_advice([*left_out, layer.name])}"
            ) from None
    return new


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
def load_foreign(cells: Sequence[Cell], saved: Mapping[str, SavedTensor], match: Match, path: Path) -> list[str]:
    """Loads weights made elsewhere into this worker's layers; floating-point values take the types of the model.

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


def _chosen(
    layer: str,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    left_out: Sequence[str],
) -> dict[str, Tensor]:
    taken = {name: averages.get(name, value) for name, value in saved.items()}
    kept = {name: value.detach().clone() for name, value in own.items() if is_named(f"{layer}.{name}", left_out)}
    return {name: value for name, value in taken.items() if not is_named(f"{layer}.{name}", left_out)} | kept


def _parameters_of(info: CheckpointInfo) -> set[str]:
    return _parameters({name: file.parameters for name, file in info.layers.items()})


def _parameters(layers: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{layer}.{name}" for layer, names in layers.items() for name in names}


def _layer_of(parameter: str, model: Mapping[str, Sequence[str]]) -> str:
    """Returns the name of the parameter's layer where this model has it; else the parameter's own."""
    return next((layer for layer in model if parameter.startswith(f"{layer}.")), parameter)


def _advice(patterns: Sequence[str]) -> str:
    return f"checkpoint.init_except=[{','.join(dict.fromkeys(patterns))}]"
