"""Refuses a model that the memory of this machine or its GPUs cannot hold, counted on layers without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from ..config import Settings
from ..cpu import usable_memory
from ..distributed.world import World
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..partition.fake_layers import CostError, TensorShape
from ..partition.tie_search import find_ties
from .build import build_optimizer
from .optimizer_bytes import optimizer_state_bytes

MARGIN = 1.1  # of the memory: a little more may still run, with swapped pages
FEW = 10  # times the weights that a model may take, whatever the optimizer: its state is not looked at then


@dataclass(frozen=True)
class Room:
    """Describes the memory that the workers have.

    Attributes:
        name: of one device, for messages.
        memory: bytes of one device: the machine, or a GPU.
        devices: their number, at most.
    """

    name: str
    memory: int
    devices: int = 1


def room_of(world: World, one_machine: bool) -> Room | None:
    """Returns the memory of the devices of all workers, of which each is like this worker's; None where it is unknown.

    Args:
        one_machine: all workers run on this machine; otherwise each may have one of its own.
    """
    if world.device.type == "cuda":
        devices = min(world.size, torch.cuda.device_count()) if one_machine else world.size
        return Room("GPU", torch.cuda.get_device_properties(world.device).total_memory, devices)
    memory = usable_memory()
    return None if memory is None else Room("machine", memory, 1 if one_machine else world.size)


def refuse_without_room(builders: Sequence[LayerBuilder], settings: Settings, room: Room, trains: bool) -> None:
    """Compares weights, and in training gradients and the optimizer's state, with the memory there is.

    Activations are not counted, so what passes may still be too large.

    Raises:
        ConfigurationError: a layer does not fit one device, or the model does not fit them all.
    """
    try:
        layers = find_ties(builders).own
    except CostError as error:
        raise ConfigurationError(str(error)) from error
    replicas = settings.pipeline.replicas
    if FEW * replicas * sum(shape.bytes for layer in layers for shape, _ in layer) < room.memory:
        return
    copies = 1 if settings.pipeline.shard_optimizer else replicas  # of the optimizer's state
    state_of = cache(partial(optimizer_state_bytes, partial(build_optimizer, settings.optimizer)))

    def bytes_of(layer: Sequence[tuple[TensorShape, bool]], replicas: int, copies: float) -> int:
        kept = sum(shape.bytes * (1 + (trained and trains)) for shape, trained in layer) * replicas
        return kept + round(copies * sum(state_of(shape) for shape, trained in layer if trained and trains))

    sizes = [bytes_of(layer, replicas, copies) for layer in layers]
    largest = max(range(len(layers)), key=sizes.__getitem__)
    name, alone = repr(builders[largest].name), bytes_of(layers[largest], 1, copies / replicas)
    kept = "weights, gradients and optimizer state" if trains else "weights"
    if alone > MARGIN * room.memory:
        raise ConfigurationError(
            f"layer {name} has {_numbers(layers[largest]):,} parameters, whose {kept} take {_size(alone)}; this "
            f"{room.name} has {_size(room.memory)}, and a layer lies on one: make several layers of it"
        )
    if sum(sizes) > MARGIN * room.memory * room.devices:
        there = f"this {room.name} has" if room.devices == 1 else f"{room.devices} {room.name}s have"
        each = f" in {replicas} replicas" if replicas > 1 else ""
        raise ConfigurationError(
            f"the model has {sum(map(_numbers, layers)):,} parameters, whose {kept}{each} take {_size(sum(sizes))}; "
            f"{there} {_size(room.memory * room.devices)}. The largest layer is {name}, with {_size(sizes[largest])}: "
            f"make the model smaller, or use more {room.name}s (gpipe-plan shows what fits)"
        )


def _numbers(layer: Sequence[tuple[TensorShape, bool]]) -> int:
    return sum(shape.numel for shape, _ in layer)


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB"
