"""Takes the weights of another run for a new one, but for layers that begin anew (paper, section 4: transfer)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from ..pipeline.cell import Cell
from .files import CheckpointError, CheckpointInfo, shorten
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
    lacking = [name for name in sorted(here - there) if not _is_left_out(name, left_out)]
    unknown = [name for name in sorted(there - here) if not _is_left_out(name, left_out)]
    faults = [f"not in the checkpoint: {shorten(lacking)}"] if lacking else []
    faults += [f"not in this model: {shorten(unknown)}"] if unknown else []
    if faults:
        raise CheckpointError(
            f"{info.path} was made with another model; {'; '.join(faults)}. Give the model settings (model.*) it was "
            f"made with, or name what may differ, as {_advice([*left_out, _layer_of([*lacking, *unknown][0], model)])}"
        )


def patterns_without_effect(
    info: CheckpointInfo, model: Mapping[str, Sequence[str]], left_out: Sequence[str]
) -> list[str]:
    """Returns the patterns that match nothing in the model or the checkpoint, and may be misspelt."""
    names = _parameters(model) | _parameters_of(info)
    return [pattern for pattern in left_out if not any(_is_left_out(name, [pattern]) for name in names)]


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
        if _is_left_out(layer.name, left_out):
            new.append(layer.name)
            continue
        weights, buffers = named_tensors(layer.module)
        saved = load_layer(info, layer.name)
        better = saved.averages if averages else {}
        state = LayerState(
            _chosen(layer.name, weights, saved.weights, better, left_out),
            _chosen(layer.name, buffers, saved.buffers, better, left_out),
        )
        if any(_is_left_out(f"{layer.name}.{name}", left_out) for name in (*weights, *buffers)):
            new.append(layer.name)
        try:
            restore_layer(layer.name, layer.module, None, state)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. To begin with new values there: {_advice([*left_out, layer.name])}"
            ) from None
    return new


def _chosen(
    layer: str,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    left_out: Sequence[str],
) -> dict[str, Tensor]:
    taken = {name: averages.get(name, value) for name, value in saved.items()}
    kept = {name: value.detach().clone() for name, value in own.items() if _is_left_out(f"{layer}.{name}", left_out)}
    return {name: value for name, value in taken.items() if not _is_left_out(f"{layer}.{name}", left_out)} | kept


def _parameters_of(info: CheckpointInfo) -> set[str]:
    return _parameters({name: file.parameters for name, file in info.layers.items()})


def _parameters(layers: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{layer}.{name}" for layer, names in layers.items() for name in names}


def _is_left_out(name: str, patterns: Iterable[str]) -> bool:
    """Returns if a pattern matches a layer's name, a full parameter name, or the layer that holds the parameter."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def _layer_of(parameter: str, model: Mapping[str, Sequence[str]]) -> str:
    """Returns the name of the parameter's layer where this model has it; else the parameter's own."""
    return next((layer for layer in model if parameter.startswith(f"{layer}.")), parameter)


def _advice(patterns: Sequence[str]) -> str:
    return f"checkpoint.init_except=[{','.join(dict.fromkeys(patterns))}]"
