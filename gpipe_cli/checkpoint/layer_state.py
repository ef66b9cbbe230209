"""Moves the state of one layer between a running model and its file in a checkpoint.

One ``.safetensors`` file per layer, with tensors named ``weight:<parameter>``, ``buffer:<name>``,
``average:<parameter or buffer>`` (`optim/average.py`) and ``optimizer:<state key>:<parameter>``; optimizer values that
are no tensors stand as JSON in the file's metadata. Loading executes no code; torch.distributed.checkpoint is not used
because its ``.metadata`` file is a pickle.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..disk import whole_file
from ..json_files import parse_json
from ..layers import AGAIN, Owner, own_name
from ..typed_section import flat
from . import files
from .files import CheckpointError, CheckpointInfo, LayerFile
from .foreign import SavedTensor, open_safetensors

OptimizerValue: TypeAlias = "Tensor | bool | int | float | str | None"
PlainValues = dict[str, dict[str, bool | int | float | str | None]]  # of an optimizer, by parameter and key
SYSTEM_ERROR = re.compile(r"\b(?:code:|os error) (\d+)")  # errno in a message of safetensors


@dataclass(frozen=True)
class LayerState:
    """Holds the tensors and numbers that a checkpoint has of one layer.

    Attributes:
        weights: parameters by their name inside the layer.
        buffers: persistent buffers, likewise.
        optimizer: parameter name -> state key -> value; parameters without optimizer state are absent.
        averages: moving averages of weights and buffers by the same names; empty where the run keeps none.
        tied: parameters whose values stand in the file of another layer, their owner; own name -> owner. After
            `load_layer` their values are among ``weights``, too.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, OptimizerValue]] = field(default_factory=dict)
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    tied: Mapping[str, Owner] = field(default_factory=dict)

    @property
    def averaged(self) -> dict[str, Tensor]:
        """Returns weights and buffers by name, with the averages in place of those that have one."""
        return {**self.weights, **self.buffers, **self.averages}

    def copied(self) -> LayerState:
        """Returns a copy on the CPU."""
        tensors = {name: dict(value) for name, value in vars(self).items() if name != "tied"}
        return LayerState(**tree_map_only(Tensor, copied, tensors), tied=self.tied)


# --- between a layer and its state -----------------------------------------------------------------------------------


def layer_state(
    module: nn.Module,
    optimizer: Optimizer | None,
    averages: Mapping[str, Tensor] | None = None,
    tied: Mapping[str, Owner] | None = None,
) -> LayerState:
    """Returns the state of one layer. It refers to the live tensors, so copy it before training goes on.

    Args:
        optimizer: the worker's one optimizer over all its layers; None for a state without optimizer.
        averages: the layer's moving averages; None: there are none.
        tied: parameters of another layer, see `LayerState`; None: there are none.

    Raises:
        CheckpointError: the optimizer keeps something other than tensors, numbers, strings and None per parameter.
    """
    weights, buffers = named_tensors(module)
    weights = {name: weight for name, weight in weights.items() if name not in (tied or {})}
    kept: dict[str, Mapping[str, OptimizerValue]] = {}
    for name, parameter in weights.items():
        values = optimizer.state.get(parameter) if optimizer is not None else None
        if values:
            for key, value in values.items():
                if ":" in key or not isinstance(value, Tensor | bool | int | float | str | None):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of parameter {name} as {type(value).__name__}; "
                        "a checkpoint holds tensors, numbers, strings and None under keys without a colon: choose "
                        "another optimizer"
                    )
            kept[name] = dict(values)
    held = {name: weight.detach() for name, weight in weights.items()}
    return LayerState(held, buffers, kept, averages or {}, tied or {})


@torch.no_grad()
def restore_layer(name: str, module: nn.Module, optimizer: Optimizer | None, state: LayerState) -> None:
    """Puts a saved state into layer ``name``: weights and buffers in place, optimizer state as copies.

    Parameters that were saved without optimizer state end without it. Values keep their dtype bit for bit, which
    ``Optimizer.load_state_dict`` does not promise (it casts state to the parameter's dtype).

    Raises:
        CheckpointError: names, shapes or dtypes of weights or buffers differ; the layer is then unchanged.
    """
    weights, buffers = named_tensors(module)
    require_match(name, "parameter", weights, state.weights)
    require_match(name, "buffer", buffers, state.buffers)
    for own, saved in ((weights, state.weights), (buffers, state.buffers)):
        for key, tensor in own.items():
            tensor.copy_(saved[key])
    if optimizer is None:
        return
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for key, parameter in weights.items():
        optimizer.state.pop(parameter, None)
        if (values := state.optimizer.get(key)) and parameter in groups:
            on_device = any(groups[parameter].get(option) for option in ("capturable", "fused"))
            restored: dict[str, object] = {}
            for state_key, value in values.items():
                # torch's own rule: step counters stay on the CPU unless the update runs in a fused or captured kernel
                device = torch.device("cpu") if state_key == "step" and not on_device else parameter.device
                restored[state_key] = copied(value, device) if isinstance(value, Tensor) else value
            optimizer.state[parameter] = restored


def named_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Returns parameters and persistent buffers by name. A shared one has each of its names, as in ``state_dict``."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in persistent}
    return dict(module.named_parameters(remove_duplicate=False)), buffers


def require_match(layer: str, kind: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuses saved tensors whose names, shapes or types are not those of a layer.

    Args:
        kind: "parameter" or "buffer", for the message.
        own: the layer's tensors.

    Raises:
        CheckpointError: they differ; it names each difference.
    """
    faults = [f"{kind} {name} is not in the checkpoint" for name in own if name not in saved]
    faults += [f"{kind} {name} is in the checkpoint, not in the model" for name in saved if name not in own]
    forms = {name: (_form(own[name]), _form(saved[name])) for name in own if name in saved}
    faults += [f"{kind} {n} should be {a}, the checkpoint has {b}" for n, (a, b) in forms.items() if a != b]
    if faults:
        raise CheckpointError(f"layer {layer} does not fit its checkpoint: {files.shorten(faults)}")


def _form(tensor: Tensor) -> str:
    """Returns type and shape, such as float32[3, 4]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns a copy on a device (None: the CPU), contiguous and alone in its memory, as a file needs it."""
    return tensor.detach().to(device or "cpu", copy=True, memory_format=torch.contiguous_format)


# --- between a state and its file ------------------------------------------------------------------------------------


def save_tensors(tensors: dict[str, Tensor], path: Path, texts: dict[str, str]) -> None:
    """Writes a safetensors file in place of an empty one, whose permissions it keeps.

    Raises:
        OSError: it cannot be written.
    """
    permissions = path.stat().st_mode
    try:
        save_file(tensors, path, texts)
        path.chmod(permissions)  # safetensors puts a private file in its place
    except SafetensorError as error:
        if code := SYSTEM_ERROR.search(str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise OSError(str(error)) from error


def write_layer(directory: Path, step: int, name: str, state: LayerState) -> LayerFile:
    """Writes one layer's file into the checkpoint directory of a step and flushes it to disk.

    Raises:
        OSError: it cannot be written.
    """
    kinds = {"weight": state.weights, "buffer": state.buffers, "average": state.averages}
    tensors = {f"{kind}:{name}": tensor for kind, held in kinds.items() for name, tensor in held.items()}
    values: dict[str, dict[str, OptimizerValue]] = {}
    for parameter, entries in state.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer:{key}:{parameter}"] = value
            else:
                values.setdefault(parameter, {})[key] = value
    path = files.layer_path(directory, name)
    with whole_file(path) as draft:
        save_tensors(tensors, draft, {"layer": name, "step": str(step), "optimizer": json.dumps(values)})
        with draft.open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
    return LayerFile(name, size, files.sha256_of(path), (*state.weights, *state.tied), state.tied)


def load_layer(info: CheckpointInfo, name: str) -> LayerState:
    """Reads the state of one layer to the CPU, after a check of its file's checksum.

    Raises:
        CheckpointError: the checkpoint has no such layer, or its file is damaged.
    """
    if name not in info.layers:
        raise CheckpointError(
            f"{info.path} has no layer {name}: it holds {files.shorten(list(info.layers))}; "
            "give the model settings (model.*) it was made with"
        )
    files.require_whole(info, name)
    tensors: dict[str, dict[str, Tensor]] = {"weight": {}, "buffer": {}, "average": {}}
    try:
        with safe_open(info.layer_path(name), framework="pt", device="cpu") as file:
            kept = parse_json((file.metadata() or {}).get("optimizer", "{}"), PlainValues)
            optimizer = {parameter: {**values} for parameter, values in kept.items()}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, _, rest = key.partition(":")
                tensor = file.get_tensor(key).clone()  # own memory, not a view of a file that pruning may delete
                if kind == "optimizer":
                    state_key, _, parameter = rest.partition(":")
                    optimizer.setdefault(parameter, {})[state_key] = tensor
                else:
                    tensors[kind][rest] = tensor
        for own, owner in info.layers[name].tied.items():
            for kind, tensor in _load_parameter(info, owner).items():
                tensors[kind][own] = tensor
        weights = {parameter: tensors["weight"].pop(parameter) for parameter in info.layers[name].parameters}
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{info.layer_path(name)} is not the layer file of its manifest: {error!r}") from error
    return LayerState(weights, tensors["buffer"], optimizer, tensors["average"], info.layers[name].tied)


def _load_parameter(info: CheckpointInfo, owner: Owner) -> dict[str, Tensor]:
    """Reads a parameter from its owner's file: {"weight": value}, with "average" where the run keeps averages."""
    files.require_whole(info, owner.layer)
    held = open_safetensors(info.layer_path(owner.layer))
    names = {kind: f"{kind}:{owner.parameter}" for kind in ("weight", "average")}
    return {kind: held[name].read().clone() for kind, name in names.items() if name in held}


def open_run(info: CheckpointInfo, average: bool = True) -> dict[str, SavedTensor]:
    """Returns weights and buffers of a checkpoint by their names in a plain state_dict, in model order.

    Nothing is read before `SavedTensor.read`.

    Args:
        average: take the moving averages in place of those that have one.
    """
    load = lru_cache(1)(partial(load_layer, info))  # keeps one layer in memory

    def read(layer: str, name: str) -> Tensor:
        state = load(layer)
        return (state.averaged if average else {**state.weights, **state.buffers})[name]

    found: dict[str, SavedTensor] = {}
    for layer, file in info.layers.items():
        held = open_safetensors(info.layer_path(layer)).items()
        shapes = {key.partition(":")[2]: saved.shape for key, saved in held if key.startswith(("weight:", "buffer:"))}
        shapes |= {name: found[own_name(*owner)].shape for name, owner in file.tied.items()}
        for name, shape in shapes.items():
            found[own_name(layer, name)] = SavedTensor(shape, partial(read, layer, name))
    return found


def export_state_dict(info: CheckpointInfo, average: bool = False) -> dict[str, Tensor]:
    """Returns the whole model as one plain state_dict on the CPU: ``<layer>.<parameter or buffer>``, in model order.

    Args:
        average: take the moving averages in place of the weights and statistics themselves.

    Raises:
        CheckpointError: averages are wanted and the run kept none.
    """
    if average and flat(info.state.configuration).get("trainer.average") is None:
        raise CheckpointError(
            f"{info.path} holds no averages, because its run kept none (trainer.average=null): leave out average=true"
        )
    return {name: saved.read() for name, saved in open_run(info, average).items() if AGAIN not in name}
