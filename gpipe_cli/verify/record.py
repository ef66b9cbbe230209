"""Records one training step so that two ways to run it can be compared.

Parameters, gradients, buffers and optimizer state are kept as whole tensors. Outputs of layers and the gradients
between them (far larger, and one for each micro-batch) are kept as fingerprints, so that the first layer that differs
can be named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..micro_batch import Tensors

M = TypeVar("M", bound=nn.Module)
Key = tuple[int, str]  # (index of the layer, full name of the tensor)

# Kinds of traces: a layer's output in forward and in recompute; the gradient of its output; the weights that it used in
# forward and in recompute.
OUTPUT, RECOMPUTED, GRADIENT, WEIGHTS, WEIGHTS_AGAIN = "output", "recomputed", "gradient", "weights", "weights again"


@dataclass(frozen=True)
class Fingerprint:
    """Holds a tensor's norm and its projection on a fixed vector; almost any error changes one of them."""

    norm: float
    projection: float

    def distance(self, other: Fingerprint) -> float:
        """Returns the larger difference of the two numbers; see `number_gap`."""
        return max(number_gap(self.norm, other.norm), number_gap(self.projection, other.projection))


@dataclass(frozen=True, order=True)
class Point:
    """Identifies a fingerprint: replica, micro-batch, layer, and the number of the tensor in the layer."""

    replica: int
    micro_batch: int
    layer: int
    number: int


Trace = dict[str, dict[Point, Fingerprint]]  # kind, then point


@dataclass
class StepState:
    """Holds the record of one training step, of one worker or of the whole model.

    Attributes:
        loss: of the mini-batch, per unit of weight.
        losses: unscaled sums by (replica, micro-batch).
        gradient_norm: global, before clipping.
        gradients: of the whole mini-batch, before clipping.
        weights, buffers: after the step.
        optimizer: its state after the step, named `<parameter>:<state key>`.
        counted: the number of values per channel over which each BatchNorm has averaged in the mini-batch.
        trace: fingerprints of the layers.
    """

    loss: float = math.nan
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    gradient_norm: float = math.nan
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    weights: dict[Key, Tensor] = field(default_factory=dict)
    buffers: dict[Key, Tensor] = field(default_factory=dict)
    optimizer: dict[Key, Tensor] = field(default_factory=dict)
    counted: dict[Key, float] = field(default_factory=dict)
    trace: Trace = field(default_factory=dict)

    def take(self, other: StepState) -> None:
        """Adds the record of another worker; workers of further replicas add no tensors, only fingerprints."""
        self.gradients |= other.gradients
        self.weights |= other.weights
        self.buffers |= other.buffers
        self.optimizer |= other.optimizer
        for key, count in other.counted.items():
            self.counted[key] = self.counted.get(key, 0.0) + count
        for kind, points in other.trace.items():
            self.trace.setdefault(kind, {}).update(points)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Computes the fingerprint in float64, of the values in logical order, whatever the memory layout."""
    values = tensor.detach().reshape(-1).double()
    if not values.numel():
        return Fingerprint(0.0, 0.0)
    return Fingerprint(float(torch.linalg.vector_norm(values)), float(values @ _direction(len(values), values.device)))


@lru_cache(maxsize=32)
def _direction(size: int, device: torch.device) -> Tensor:
    """Returns a fixed vector without a pattern that data could have."""
    return torch.arange(1, size + 1, dtype=torch.float64, device=device).mul_(math.sqrt(2)).mul_(math.pi).cos_()


def number_gap(a: float, b: float) -> float:
    """Returns |a − b|; two numbers that are both not finite count as equal."""
    if not math.isfinite(a) or not math.isfinite(b):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b)


class LayerTrace:
    """Collects the fingerprints of one step."""

    def __init__(self) -> None:
        self.trace: Trace = {}

    def weights(self, kind: str, replica: int, micro_batch: int, layer: int, module: nn.Module) -> None:
        for number, parameter in enumerate(module.parameters()):
            self._put(kind, Point(replica, micro_batch, layer, number), parameter)

    def outputs(
        self, kind: str, replica: int, micro_batch: int, layer: int, outputs: Tensors, inputs: Iterable[Tensor]
    ) -> None:
        """Records what a layer returned and, during backward, the gradient of each new tensor."""
        passed = list(inputs)
        for number, tensor in enumerate(outputs):
            point = Point(replica, micro_batch, layer, number)
            self._put(kind, point, tensor)
            if tensor.requires_grad and not any(tensor is one for one in passed):
                tensor.register_hook(partial(self._gradient, point))  # type: ignore[no-untyped-call]  # torch's own

    def _gradient(self, point: Point, gradient: Tensor) -> None:
        """Records the first gradient only: a schedule that divides backward may call the hook twice."""
        if point not in self.trace.get(GRADIENT, {}):
            self._put(GRADIENT, point, gradient)

    def _put(self, kind: str, point: Point, tensor: Tensor) -> None:
        self.trace.setdefault(kind, {})[point] = fingerprint(tensor)


def named(layers: Iterable[tuple[int, str, nn.Module]]) -> Iterator[tuple[Key, nn.Parameter]]:
    """Yields every parameter of (index, name, module) layers with its key."""
    for index, layer, module in layers:
        for name, parameter in module.named_parameters():
            yield (index, f"{layer}.{name}"), parameter


def modules_of(kind: type[M], layers: Iterable[tuple[int, str, nn.Module]]) -> dict[Key, M]:
    """Returns every module of a kind in (index, name, module) layers, the layers themselves among them."""
    return {
        (index, f"{layer}.{name}".rstrip(".")): module
        for index, layer, whole in layers
        for name, module in whole.named_modules()
        if isinstance(module, kind)
    }


def named_buffers(layers: Iterable[tuple[int, str, nn.Module]]) -> dict[Key, Tensor]:
    return {
        (index, f"{layer}.{name}"): buffer for index, layer, module in layers for name, buffer in module.named_buffers()
    }


def optimizer_state(optimizer: Optimizer, parameters: Mapping[Key, nn.Parameter]) -> dict[Key, Tensor]:
    """Returns the optimizer's state of each parameter; numbers as tensors of one element."""
    return {
        (layer, f"{name}:{state}"): torch.as_tensor(value)
        for (layer, name), parameter in parameters.items()
        for state, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, (Tensor, int, float))
    }


def copied(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Returns copies on the CPU."""
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
