"""Counts the bytes that layers and cells keep between steps: weights, gradients, optimizer state, averages.

A model of which the memory of this machine or its GPUs cannot hold them is refused before it is built.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PipelineConfig, Settings
from ..cpu import usable_memory
from ..distributed.optimizer_shards import shares
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_optimizer
from ..factory.groups import GroupKey, Groups
from ..gpus import GPU
from ..layers import LayerBuilder, own_name
from ..partition.cut import Cut
from ..partition.fake_layers import TensorShape, fake_mode
from ..partition.survey import Parameter, Survey, survey
from ..partition.tracking import storage_key
from ..pipeline.tied_parameters import Use
from ..typed_section import flat
from .measure.layer_facts import ModelFacts

StateBytes = Callable[[str, TensorShape], int]  # of a parameter's full name and shape
TOLERATED = 1.1  # of the memory: a little more may still run, with swapped pages


@dataclass(frozen=True)
class KeptBytes:
    """Holds the bytes that layers keep between steps on the worker's device.

    Attributes:
        weights: bytes of weights and buffers, such as BatchNorm's moving averages.
        gradients: bytes of the gradients of weights that learn.
        optimizer: bytes of the optimizer's state.
        average: bytes of moving averages of weights and buffers (`trainer.average`).
        tied: bytes, among those of weights and gradients, for parameters that an earlier layer owns.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    tied: float

    @property
    def kept(self) -> float:
        """Returns the sum of the bytes; `tied` is part of others."""
        return self.weights + self.gradients + self.optimizer + self.average


def kept_by_layer(
    layer: str, parameters: Sequence[Parameter], state_bytes: StateBytes, copied: Collection[str] | None = None
) -> KeptBytes:
    """Returns the bytes of a layer's parameters; buffers and averages are not among them.

    Args:
        layer: name of the layer.
        state_bytes: returns the bytes of the optimizer's state for a parameter.
        copied: full names of the tied parameters of which this layer's worker keeps a value of its own; None: all.
    """
    own = [one for one in parameters if one.owner is None]
    copies = [one for one in parameters if one.owner and (copied is None or f"{layer}.{one.name}" in copied)]
    uses = [one for one in parameters if one.owner and one.form.requires_grad]
    learning = trained(layer, parameters)
    gradients = sum(one.form.bytes for one in uses)
    tied = gradients + sum(one.form.bytes for one in copies)
    return KeptBytes(
        weights=sum(one.form.bytes for one in (*own, *copies)),
        gradients=gradients + sum(shape.bytes for _, shape in learning),
        optimizer=sum(state_bytes(*each) for each in learning),
        average=0,
        tied=tied,
    )


def trained(layer: str, parameters: Sequence[Parameter]) -> list[tuple[str, TensorShape]]:
    """Returns the full names and shapes of a layer's own parameters that learn."""
    own = [one for one in parameters if one.owner is None and one.form.requires_grad]
    return [(own_name(layer, one.name), one.form) for one in own]


def copied_parameters(ties: Sequence[Sequence[Use]]) -> set[str]:
    """Returns the full names of the uses for which a worker keeps a copy of a value.

    These are a worker's first use of each parameter that another worker owns.
    """
    firsts = [{use.worker: use.name for use in reversed(uses)} for uses in ties]
    owners = {owner.name for owner, *_ in ties}
    return {name for first in firsts for name in first.values()} - owners


class KeptMemory:
    """Counts the bytes that the layers of one model keep between steps.

    Args:
        settings: settings of the run. Methods that need the section `pipeline` get it, as it may be another one.
    """

    def __init__(self, settings: Settings) -> None:
        self._averages = settings.trainer.average is not None
        self.state_bytes = optimizer_state_bytes(settings.optimizer)
        self._layers: list[KeptBytes] = []

    def layers(self, model: ModelFacts) -> list[KeptBytes]:
        """Returns the most bytes of each layer, in whichever cell it lies; fewer if tied parameters need no copy."""
        if not self._layers:
            self._layers = [self._of(model, index, None) for index in range(len(model.layers))]
        return self._layers

    def _of(self, model: ModelFacts, index: int, copied: Collection[str] | None) -> KeptBytes:
        """Returns the bytes of one layer; ``copied`` as in `kept_by_layer`."""
        facts, parameters = model.layers[index], model.parameters[index]
        kept = kept_by_layer(model.names[index], parameters, self.state_bytes, copied)
        own = sum(one.form.bytes for one in parameters if one.owner is None)
        average = self._averages * (own + facts.averaged_buffer_bytes)
        return replace(kept, weights=kept.weights + facts.buffer_bytes, average=average)

    def of_cells(self, model: ModelFacts, cut: Cut, pipeline: PipelineConfig) -> list[KeptBytes]:
        """Returns the bytes of each cell. If replicas divide the optimizer's state, the largest share of it counts."""
        copied = copied_parameters(cut.uses(model.names))
        layers = [astuple(self._of(model, index, copied)) for index in range(len(model.layers))]
        cells = [KeptBytes(*map(sum, zip(*layers[own.start : own.stop], strict=True))) for own in cut.layers]
        if pipeline.shard_optimizer:
            for worker in range(pipeline.worker_count):
                own = [cell for cell, of in enumerate(cut.placement) if of == worker]
                share = self._largest_share(model, [index for cell in own for index in cut.layers[cell]], pipeline)
                for cell in own:
                    cells[cell] = replace(cells[cell], optimizer=cells[cell].optimizer * share)
        return cells

    def _largest_share(self, model: ModelFacts, layers: Sequence[int], pipeline: PipelineConfig) -> float:
        """Returns the largest share of a worker's optimizer state that one replica has, from 0 to 1.

        Args:
            layers: indices of the worker's layers.
        """
        parameters = [each for index in layers for each in trained(model.names[index], model.parameters[index])]
        states = [0.0] * pipeline.replicas
        owners = shares([shape.numel for _, shape in parameters], pipeline.replicas)
        for (name, shape), owner in zip(parameters, owners, strict=True):
            states[owner] += self.state_bytes(name, shape)
        return max(states) / sum(states) if any(states) else 1.0

    def of_layers(self, model: ModelFacts, pipeline: PipelineConfig) -> list[float]:
        """Returns the bytes of each layer. If replicas divide the optimizer's state, an even share of it counts."""
        shards = pipeline.replicas if pipeline.shard_optimizer else 1
        return [each.kept - each.optimizer * (1 - 1 / shards) for each in self.layers(model)]


# -- the optimizer's state -------------------------------------------------------------------------------------------


def optimizer_state_bytes(section: Mapping[str, Any]) -> StateBytes:
    """Returns a function that returns the bytes of state that an optimizer keeps for a parameter.

    They are what a step on a tensor without values has made. Equal parameters are looked at once.

    Args:
        section: the section `optimizer`.
    """
    groups = Groups(section)

    @cache
    def of_key(key: GroupKey, shape: TensorShape) -> int:
        with fake_mode():
            parameter = nn.Parameter(torch.empty(shape.shape, dtype=shape.dtype))
            parameter.grad = torch.zeros_like(parameter)
            optimizer = build_optimizer(section, {key: [parameter]})
            with suppress(Exception):  # some optimizers look at values once they have made their state
                optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    return lambda name, shape: of_key(groups.key(name, shape.shape), shape)


# -- what no memory here holds -----------------------------------------------------------------------------------------


def memory_of(world: World, one_machine: bool, pipeline: PipelineConfig) -> int:
    """Returns the bytes of all workers' devices together; with offload those free on disk, or of a GPU's host.

    Other workers' devices are taken to be like this worker's.

    Args:
        one_machine: True if all workers run on this machine; else each may have a machine of its own.
    """
    if pipeline.offload and world.device.type == "cpu":
        return shutil.disk_usage(pipeline.offload_dir or ".").free * (1 if one_machine else world.size)
    if world.device.type == GPU and not pipeline.offload:
        devices = min(world.size, torch.cuda.device_count()) if one_machine else world.size
        return devices * torch.cuda.get_device_properties(world.device).total_memory
    return usable_memory() * (1 if one_machine else world.size)


def refuse_too_large(builders: Sequence[LayerBuilder], settings: Settings, memory: int, trains: bool) -> None:
    """Refuses a model whose weights, and in training gradients and optimizer state, do not fit the memory.

    Activations are not counted, so a model that passes may still be too large.

    Args:
        memory: bytes of all devices together.
        trains: False for evaluation, which needs the weights only.

    Raises:
        ConfigurationError: the model does not fit, or a layer cannot be built.
    """
    found: Survey[Any] = survey(builders)
    replicas = settings.pipeline.replicas
    copies = 1 if settings.pipeline.shard_optimizer else replicas  # of the optimizer's state
    state_of = optimizer_state_bytes(settings.optimizer)

    def bytes_of(layer: str, parameters: Sequence[Parameter]) -> float:
        kept = kept_by_layer(layer, parameters, state_of if trains else lambda *_: 0, copied=())
        return kept.weights * replicas + trains * (kept.gradients * replicas + kept.optimizer * copies)

    sizes = list(map(bytes_of, found.names, found.parameters))
    if sum(sizes) > TOLERATED * memory:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        kept = "weights, gradients and optimizer state" if trains else "weights"
        each = f" in {replicas} replicas" if replicas > 1 else ""
        where = " free in pipeline.offload_dir, or on a GPU's host" if settings.pipeline.offload else ""
        counts = {key: value for key, value in flat(settings.model, "model.").items() if type(value) is int}
        raise ConfigurationError(
            f"the model has {sum(found.sizes):,} parameters, whose {kept}{each} take {_size(sum(sizes))}; there are "
            f"{_size(memory)}{where}. The largest layer is {found.names[largest]!r}, with {_size(sizes[largest])}: "
            f"make the model smaller ({', '.join(f'{key}={value}' for key, value in counts.items())}), or use more "
            "machines or GPUs (gpipe-plan shows what fits)"
        )


def _size(number: float) -> str:
    """Returns a number of bytes as text in GB."""
    return f"{number / 1e9:,.1f} GB"
