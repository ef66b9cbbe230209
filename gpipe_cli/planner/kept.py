"""Counts the bytes that layers and cells keep between steps: weights, gradients, optimizer state, averages."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import PipelineConfig, Settings
from ..distributed.optimizer_shards import shares
from ..factory.build import build_optimizer
from ..factory.groups import GroupKey, Groups
from ..layers import own_name
from ..partition.cut import Cut
from ..partition.fake_layers import TensorShape, fake_mode
from ..partition.survey import Parameter
from ..pipeline.tied_parameters import Use
from .measure.layer_facts import ModelFacts

MakeOptimizer = Callable[[nn.Parameter], Optimizer]
StateBytes = Callable[[str, TensorShape], int]  # of a parameter's full name and shape
_SMALL = 2  # side of the real parameter that replaces a fake one where the optimizer looks at values


@dataclass(frozen=True)
class KeptBytes:
    """Says what layers keep between steps, in bytes, and so what lives on the worker's device.

    Attributes:
        weights: weights and buffers, such as BatchNorm's moving averages.
        gradients: gradients of the weights that learn.
        optimizer: the optimizer's state.
        average: moving averages of weights and buffers (`trainer.average`).
        tied: those of weights and gradients that another layer's cell has too.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    tied: float

    @property
    def kept(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.average


def sum_of_bytes(parts: Iterable[KeptBytes]) -> KeptBytes:
    return KeptBytes(*map(sum, zip(*map(astuple, parts), strict=True)))


def kept_by_layer(
    layer: str, parameters: Sequence[Parameter], state_bytes: StateBytes, copied: Collection[str] | None = None
) -> KeptBytes:
    """Returns the bytes of a layer's parameters; buffers and averages are not among them.

    Args:
        layer: its name.
        state_bytes: returns the bytes of the optimizer's state for a parameter.
        copied: full names of the tied parameters whose value this layer's worker keeps; None: all.
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
    """Returns the uses for which a worker keeps a value: its first of each parameter that another worker owns."""
    firsts = [{use.worker: use.name for use in reversed(uses)} for uses in ties]
    owners = {owner.name for owner, *_ in ties}
    return {name for first in firsts for name in first.values()} - owners


def largest_share(parameters: Sequence[tuple[str, TensorShape]], replicas: int, state_bytes: StateBytes) -> float:
    """Returns the largest part of the state of a worker's parameters that one of its replicas has."""
    states = [0.0] * replicas
    owners = shares([shape.numel for _, shape in parameters], replicas)
    for (name, shape), owner in zip(parameters, owners, strict=True):
        states[owner] += state_bytes(name, shape)
    return max(states) / sum(states) if any(states) else 1.0


class KeptMemory:
    """Counts the bytes that the layers of one model keep between steps.

    Args:
        settings: the run's; of the section `pipeline` another may be given to its methods.
        per_parameter: bytes of a parameter, whatever they are for (`plan.bytes_per_parameter`); None: counted.
    """

    def __init__(self, settings: Settings, per_parameter: float | None = None) -> None:
        self._averages, self._per_parameter = settings.trainer.average is not None, per_parameter
        self.state_bytes = optimizer_state_bytes(settings.optimizer)
        self._known: dict[int, KeptBytes] = {}

    def of(self, model: ModelFacts, index: int, copied: Collection[str] | None = None) -> KeptBytes:
        """Returns the bytes of one layer; ``copied``: as of `kept_by_layer`."""
        if copied is not None:
            return self._counted(model, index, copied)
        if index not in self._known:
            self._known[index] = self._counted(model, index, None)
        return self._known[index]

    def _counted(self, model: ModelFacts, index: int, copied: Collection[str] | None) -> KeptBytes:
        facts, parameters = model.layers[index], model.parameters[index]
        own = [one.form for one in parameters if one.owner is None]
        kept = kept_by_layer(model.names[index], parameters, self.state_bytes, copied)
        if self._per_parameter is not None:
            whole = sum(shape.numel for shape in own) * self._per_parameter
            gradients = min(kept.gradients, whole)
            return KeptBytes(whole - gradients, gradients, 0, 0, 0)
        average = self._averages * (sum(shape.bytes for shape in own) + facts.averaged_buffer_bytes)
        return replace(kept, weights=kept.weights + facts.buffer_bytes, average=average)

    def of_cells(self, model: ModelFacts, cut: Cut, pipeline: PipelineConfig) -> list[KeptBytes]:
        """Returns the bytes of each cell; of an optimizer state that replicas share, the largest share."""
        copied = copied_parameters(cut.uses(model.names))
        cells = [sum_of_bytes(self.of(model, index, copied) for index in members) for members in cut.layers]
        if not pipeline.shard_optimizer:
            return cells
        part = cache(lambda worker: largest_share(_trained_by(model, cut, worker), pipeline.replicas, self.state_bytes))
        both = zip(cells, cut.placement, strict=True)
        return [replace(kept, optimizer=kept.optimizer * part(worker)) for kept, worker in both]

    def of_layers(self, model: ModelFacts, pipeline: PipelineConfig) -> list[float]:
        """Returns the bytes of each layer, wherever it lies: at most, where it uses tied parameters."""
        shards = pipeline.replicas if pipeline.shard_optimizer else 1
        kept = (self.of(model, index) for index in range(len(model.layers)))
        return [each.kept - each.optimizer * (1 - 1 / shards) for each in kept]


def _trained_by(model: ModelFacts, cut: Cut, worker: int) -> list[tuple[str, TensorShape]]:
    own = [index for of, members in zip(cut.placement, cut.layers, strict=True) if of == worker for index in members]
    return [each for index in own for each in trained(model.names[index], model.parameters[index])]


# -- the optimizer's state -------------------------------------------------------------------------------------------


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
