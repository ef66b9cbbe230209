"""What one training step left behind, in a form in which two ways to run it can be compared.

Of parameters, gradients, buffers and optimizer state the whole tensors are kept. Of what passes between the layers
(far larger, and once a micro-batch) a fingerprint is kept, so that the first layer that differs can be named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..micro_batch import Tensors

M = TypeVar("M", bound=nn.Module)
Key = tuple[int, str]  # (index of the layer, full name of the tensor)

# Kinds of traces: what a layer gave in its forward and when it was computed again; the gradient that reached its
# output; the weights that it used in each of the two.
OUTPUT, RECOMPUTED, GRADIENT, WEIGHTS, WEIGHTS_AGAIN = "output", "recomputed", "gradient", "weights", "weights again"


@dataclass(frozen=True)
class Fingerprint:
    """Two numbers of a tensor that hardly any error leaves as they are: its norm and a fixed projection."""

    norm: float
    projection: float

    def distance(self, other: Fingerprint) -> float:
        """0 when equal; two numbers that are both not finite count as equal."""
        return max(_gap(self.norm, other.norm), _gap(self.projection, other.projection))


@dataclass(frozen=True, order=True)
class Point:
    """Where a fingerprint was taken: which layer, in which micro-batch, which of its tensors."""

    replica: int
    micro_batch: int
    layer: int
    number: int


Trace = dict[str, dict[Point, Fingerprint]]  # kind, then point


@dataclass
class StepState:
    """One training step, of one worker or of the whole model.

    Attributes:
        loss: of the mini-batch, per unit of weight. losses: unscaled sums by (replica, micro-batch).
        gradient_norm: global, before clipping.
        gradients: of the whole mini-batch, before clipping.
        weights, buffers: after the step. optimizer: its state after the step, named `<parameter>:<state key>`.
        counted: how many values a channel of each BatchNorm has been averaged over in the mini-batch.
        trace: of the layers.
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
        """Adds what another worker has recorded; one of a further replica brings no tensors, only fingerprints."""
        self.gradients |= other.gradients
        self.weights |= other.weights
        self.buffers |= other.buffers
        self.optimizer |= other.optimizer
        for key, count in other.counted.items():
            self.counted[key] = self.counted.get(key, 0.0) + count
        for kind, points in other.trace.items():
            self.trace.setdefault(kind, {}).update(points)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Of the values in their logical order, whatever the memory layout; worked out in float64."""
    values = tensor.detach().reshape(-1).double()
    if not values.numel():
        return Fingerprint(0.0, 0.0)
    return Fingerprint(float(torch.linalg.vector_norm(values)), float(values @ _direction(len(values), values.device)))


@lru_cache(maxsize=32)
def _direction(size: int, device: torch.device) -> Tensor:
    """A fixed vector without a pattern that data could have."""
    return torch.arange(1, size + 1, dtype=torch.float64, device=device).mul_(math.sqrt(2)).mul_(math.pi).cos_()


def _gap(a: float, b: float) -> float:
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
        """What a layer returned; and, once backward comes by, the gradient of each new tensor."""
        passed = list(inputs)
        for number, tensor in enumerate(outputs):
            point = Point(replica, micro_batch, layer, number)
            self._put(kind, point, tensor)
            if tensor.requires_grad and not any(tensor is one for one in passed):
                tensor.register_hook(_Hook(self, point))  # type: ignore[no-untyped-call]  # torch's own

    def gradient(self, point: Point, gradient: Tensor) -> None:
        """The first one counts: a schedule that divides backward may come by twice."""
        if point not in self.trace.get(GRADIENT, {}):
            self._put(GRADIENT, point, gradient)

    def _put(self, kind: str, point: Point, tensor: Tensor) -> None:
        self.trace.setdefault(kind, {})[point] = fingerprint(tensor)


@dataclass(frozen=True)
class _Hook:
    """Looks at a gradient and leaves it as it is."""

    trace: LayerTrace
    point: Point

    def __call__(self, gradient: Tensor) -> None:
        self.trace.gradient(self.point, gradient)


def named(layers: Iterable[tuple[int, str, nn.Module]]) -> Iterator[tuple[Key, nn.Parameter]]:
    """Every parameter of (index, name, module) layers with its key."""
    for index, layer, module in layers:
        for name, parameter in module.named_parameters():
            yield (index, f"{layer}.{name}"), parameter


def modules_of(kind: type[M], layers: Iterable[tuple[int, str, nn.Module]]) -> dict[Key, M]:
    """Every module of a kind in (index, name, module) layers, the layers themselves among them."""
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
    """The optimizer's state of each parameter; numbers as tensors of one element."""
    return {
        (layer, f"{name}:{state}"): torch.as_tensor(value)
        for (layer, name), parameter in parameters.items()
        for state, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, (Tensor, int, float))
    }


def copied(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Snapshots on the CPU."""
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
