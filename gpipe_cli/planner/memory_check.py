"""Refuses a model that the memory of this machine or its GPUs cannot hold, counted on layers without memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Settings
from ..cpu import usable_memory
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_optimizer
from ..factory.groups import GroupKey, Groups
from ..gpus import GPU
from ..layers import LayerBuilder, own_name
from ..partition.fake_layers import CostError, TensorShape, fake_mode
from ..partition.tie_search import find_ties
from ..typed_section import flat

MARGIN = 1.1  # of the memory: a little more may still run, with swapped pages
MakeOptimizer = Callable[[nn.Parameter], Optimizer]
StateBytes = Callable[[str, TensorShape], int]  # of a parameter's full name and shape
_SMALL = 2  # side of the real parameter that replaces a fake one where the optimizer looks at values
FEW = 10  # times the weights that a model may take, whatever the optimizer: its state is not looked at then


def memory_of(world: World, one_machine: bool) -> int:
    """Returns the bytes of memory of all workers' devices, each like this worker's.

    Args:
        one_machine: all workers run on this machine; otherwise each may have one of its own.
    """
    if world.device.type == GPU:
        devices = min(world.size, torch.cuda.device_count()) if one_machine else world.size
        return devices * torch.cuda.get_device_properties(world.device).total_memory
    return usable_memory() * (1 if one_machine else world.size)


def refuse_too_large(builders: Sequence[LayerBuilder], settings: Settings, memory: int, trains: bool) -> None:
    """Compares weights, and in training gradients and the optimizer's state, with the memory in bytes.

    Activations are not counted, so what passes may still be too large.

    Raises:
        ConfigurationError: the model does not fit.
    """
    try:
        layers = find_ties(builders).own
    except CostError as error:
        raise ConfigurationError(str(error)) from error
    replicas = settings.pipeline.replicas
    if FEW * replicas * sum(shape.bytes for layer in layers for _, shape, _ in layer) < memory:
        return
    copies = 1 if settings.pipeline.shard_optimizer else replicas  # of the optimizer's state
    state_of = optimizer_state_bytes(settings.optimizer)

    def bytes_of(builder: LayerBuilder, layer: Sequence[tuple[str, TensorShape, bool]]) -> int:
        kept = sum(shape.bytes * (1 + (trained and trains)) for _, shape, trained in layer) * replicas
        learning = [(own_name(builder.name, name), shape) for name, shape, trained in layer if trained and trains]
        return kept + copies * sum(state_of(name, shape) for name, shape in learning)

    sizes = list(map(bytes_of, builders, layers))
    if sum(sizes) > MARGIN * memory:
        largest = max(range(len(layers)), key=sizes.__getitem__)
        kept = "weights, gradients and optimizer state" if trains else "weights"
        each = f" in {replicas} replicas" if replicas > 1 else ""
        parameters = sum(shape.numel for layer in layers for _, shape, _ in layer)
        counts = {key: value for key, value in flat(settings.model, "model.").items() if type(value) is int}
        raise ConfigurationError(
            f"the model has {parameters:,} parameters, whose {kept}{each} take {_size(sum(sizes))}; there are "
            f"{_size(memory)}. The largest layer is {builders[largest].name!r}, with {_size(sizes[largest])}: "
            f"make the model smaller ({', '.join(f'{key}={value}' for key, value in counts.items())}), or use more "
            "machines or GPUs (gpipe-plan shows what fits)"
        )


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB"


def optimizer_state_bytes(section: Mapping[str, Any]) -> StateBytes:
    """Returns a function to the bytes of state that an optimizer keeps for a parameter; equal ones are looked at once.

    Args:
        section: `optimizer`.
    """
    groups = Groups(section)

    @cache
    def of_key(key: GroupKey, shape: TensorShape) -> int:
        return _bytes_for(lambda parameter: build_optimizer(section, {key: [parameter]}), shape)

    return lambda name, shape: of_key(groups.key(name, shape.shape), shape)


def _bytes_for(make: MakeOptimizer, shape: TensorShape) -> int:
    try:
        with fake_mode():
            return _state_bytes(make, torch.empty(shape.shape, dtype=shape.dtype))
    except Exception:  # the optimizer looks at values: scale up its state for a small parameter
        small = torch.zeros([min(size, _SMALL) for size in shape.shape], dtype=shape.dtype)
        return round(_state_bytes(make, small) / max(1, small.numel()) * shape.numel)


def _state_bytes(make: MakeOptimizer, weight: Tensor) -> int:
    parameter = nn.Parameter(weight)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make(parameter)
    try:
        optimizer.step()
    except Exception:
        if not any(optimizer.state.values()):  # some optimizers look at values only after they have made their state
            raise
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())
