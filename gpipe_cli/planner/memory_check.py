"""Refuses a model that the memory of this machine or its GPUs cannot hold, counted on layers without memory."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch

from ..config import PipelineConfig, Settings
from ..cpu import usable_memory
from ..distributed.world import World
from ..errors import ConfigurationError
from ..gpus import GPU
from ..layers import LayerBuilder
from ..partition.fake_layers import CostError
from ..partition.survey import Parameter, Survey, survey
from ..typed_section import flat
from .kept import kept_by_layer, optimizer_state_bytes

MARGIN = 1.1  # of the memory: a little more may still run, with swapped pages


def memory_of(world: World, one_machine: bool, pipeline: PipelineConfig) -> int:
    """Returns the bytes of memory of all workers' devices, each like this worker's; with offload those free on disk.

    Args:
        one_machine: all workers run on this machine; otherwise each may have one of its own.
    """
    if pipeline.offload:
        return shutil.disk_usage(pipeline.offload_dir or ".").free * (1 if one_machine else world.size)
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
        found: Survey[Any] = survey(builders)
    except CostError as error:
        raise ConfigurationError(str(error)) from error
    replicas = settings.pipeline.replicas
    copies = 1 if settings.pipeline.shard_optimizer else replicas  # of the optimizer's state
    state_of = optimizer_state_bytes(settings.optimizer)

    def bytes_of(layer: str, parameters: Sequence[Parameter]) -> float:
        kept = kept_by_layer(layer, parameters, state_of if trains else lambda *_: 0, copied=())
        return kept.weights * replicas + trains * (kept.gradients * replicas + kept.optimizer * copies)

    sizes = list(map(bytes_of, found.names, found.parameters))
    if sum(sizes) > MARGIN * memory:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        kept = "weights, gradients and optimizer state" if trains else "weights"
        each = f" in {replicas} replicas" if replicas > 1 else ""
        where = " free in pipeline.offload_dir" if settings.pipeline.offload else ""
        counts = {key: value for key, value in flat(settings.model, "model.").items() if type(value) is int}
        raise ConfigurationError(
            f"the model has {sum(found.sizes):,} parameters, whose {kept}{each} take {_size(sum(sizes))}; there are "
            f"{_size(memory)}{where}. The largest layer is {found.names[largest]!r}, with {_size(sizes[largest])}: "
            f"make the model smaller ({', '.join(f'{key}={value}' for key, value in counts.items())}), or use more "
            "machines or GPUs (gpipe-plan shows what fits)"
        )


def _size(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"
