"""Records one training step so that two ways to run it can be compared.

What passes through the layers is kept as fingerprints, one for each micro-batch, and numbers as they are. Tensors of
the model's size (weights, gradients, optimizer state) are not kept here but in files (`spill.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch

from ..micro_batch import Tensors

M = TypeVar("M", bound=nn.Module)
Key = tuple[int, str]  # (index of the layer, full name of the tensor)
Place = tuple[int, int]  # (replica, micro-batch)
Layers = Iterable[tuple[int, str, nn.Module]]  # index, name, module

# Kinds of traces: a layer's output in forward and in recompute; the gradient of its output; the weights that it used in
# forward and in recompute; what the first layer of a cell was given in both.
OUTPUT, RECOMPUTED, GRADIENT, WEIGHTS, WEIGHTS_AGAIN = "output", "recomputed", "gradient", "weights", "weights again"
INPUT, INPUT_AGAIN = "input", "input again"
WIDTH = 4096  # of a row, when a tensor is projected row by row


class Fingerprint(NamedTuple):
    """Holds a tensor's norm, its projection on a fixed vector, its number of elements and its type.

    Almost any error changes one of them.
    """

    norm: float
    projection: float
    size: int
    dtype: str

    def distance(self, other: Fingerprint) -> float:
        """Returns the larger difference of the two numbers (see `number_gap`); infinite where sizes or types differ."""
        if (self.size, self.dtype) != (other.size, other.dtype):
            return math.inf
        return max(number_gap(self.norm, other.norm), number_gap(self.projection, other.projection))


class Point(NamedTuple):
    """Identifies a fingerprint: replica, micro-batch, layer, and the number of the tensor in the layer."""

    replica: int
    micro_batch: int
    layer: int
    number: int


Trace = dict[str, dict[Point, Fingerprint]]  # kind, then point
Call = tuple[int, int, int]  # (replica, micro-batch, layer)
Seeds = dict[str, dict[Call, int]]  # kind, then call
Modes = dict[str, dict[Call, str]]


@dataclass
class RecordedStep:
    """Holds the record of one training step, of one worker or of the whole model.

    Attributes:
        loss: of the mini-batch, per unit of weight.
        losses: unscaled sums by (replica, micro-batch).
        statistics: sums of the task's statistics.
        gradient_norm: global, before clipping.
        loss_scale: factor of what passes back between layers.
        counted: the number of values per channel over which each BatchNorm has averaged in the mini-batch.
        trace: fingerprints of the layers.
        seeds: of the random numbers that each layer could draw.
        modes: of the layers: training or evaluation, and autocast.
        rates: the learning rate of each parameter in the update.
        used: the norm of each gradient that the optimizer was given.
        held: fingerprints of everything held after the step, by replica.
    """

    loss: float = math.nan
    losses: dict[Place, float] = field(default_factory=dict)
    statistics: list[float] = field(default_factory=list)
    gradient_norm: float = math.nan
    loss_scale: float = 1.0
    counted: dict[Key, float] = field(default_factory=dict)
    trace: Trace = field(default_factory=dict)
    seeds: Seeds = field(default_factory=dict)
    modes: Modes = field(default_factory=dict)
    rates: dict[Key, float] = field(default_factory=dict)
    used: dict[Key, float] = field(default_factory=dict)
    held: dict[int, dict[Key, Fingerprint]] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def take(self, other: RecordedStep) -> None:
        """Adds the record of another worker."""
        for key, count in other.counted.items():
            self.counted[key] = self.counted.get(key, 0.0) + count
        for name in ("trace", "seeds", "modes", "held"):
            mine = getattr(self, name)
            for kind, found in getattr(other, name).items():
                mine.setdefault(kind, {}).update(found)
        self.rates |= other.rates
        self.used |= other.used

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(self), path)

    @classmethod
    def read(cls, path: Path) -> RecordedStep:
        """Reads what `write` wrote."""
        with torch.serialization.safe_globals([Point, Fingerprint]):
            return cls(**torch.load(path, weights_only=True))


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Computes the fingerprint in float64, of the values in logical order, whatever the memory layout."""
    values, dtype = tensor.detach().reshape(-1), str(tensor.dtype).removeprefix("torch.")
    if not values.numel():
        return Fingerprint(0.0, 0.0, 0, dtype)
    values = values.double()
    rows = F.pad(values, (0, -len(values) % min(WIDTH, len(values)))).view(-1, min(WIDTH, len(values)))
    projection = rows @ _direction(rows.shape[1], values.device) @ _direction(len(rows), values.device)
    return Fingerprint(float(torch.linalg.vector_norm(values)), float(projection), len(values), dtype)


@lru_cache(maxsize=256)
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
        self.seeds: Seeds = {}
        self.modes: Modes = {}
        self._known: dict[int, tuple[int, int, Fingerprint]] = {}  # of a parameter: address, version, fingerprint

    def inputs(self, kind: str, call: Call, weights: Sequence[Tensor]) -> None:
        """Records a layer's weights and the seed of its random numbers, before it runs."""
        for number, parameter in enumerate(weights):
            address, version, mark = self._known.get(id(parameter), (0, -1, None))
            if mark is None or (address, version) != (parameter.data_ptr(), parameter._version):
                with no_dispatch(), torch._C.DisableTorchFunction():  # WeightCasts would count this reading as a use
                    mark = fingerprint(parameter)
                self._known[id(parameter)] = parameter.data_ptr(), parameter._version, mark
            self.trace.setdefault(kind, {})[Point(*call, number)] = mark
        self.seeds.setdefault(kind, {})[call] = torch.initial_seed()

    def mode(self, kind: str, call: Call, module: nn.Module, device: torch.device) -> None:
        """Records how a layer runs: in training or evaluation mode, and with which autocast."""
        still = [name or "itself" for name, part in module.named_modules() if not part.training]
        cast = str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "no"
        mode = f"in evaluation mode ({still[0]})" if still else "in training mode"
        self.modes.setdefault(kind, {})[call] = f"{mode} with {cast.removeprefix('torch.')} autocast"

    def outputs(self, kind: str, call: Call, outputs: Tensors, inputs: Tensors) -> None:
        """Records what a layer returned and, during backward, the gradient of each new tensor."""
        for number, tensor in enumerate(outputs):
            point = Point(*call, number)
            self.trace.setdefault(kind, {})[point] = fingerprint(tensor)
            if tensor.requires_grad and not any(tensor is one for one in inputs):
                tensor.register_hook(partial(self._gradient, point))  # type: ignore[no-untyped-call]  # torch's own

    def _gradient(self, point: Point, gradient: Tensor) -> None:
        """Records the first gradient only: a schedule that divides backward may call the hook twice."""
        known = self.trace.setdefault(GRADIENT, {})
        if point not in known:
            known[point] = fingerprint(gradient)


# -- tensors by name ---------------------------------------------------------------------------------------------------


def named(layers: Layers) -> Iterator[tuple[Key, nn.Parameter]]:
    """Yields every parameter of (index, name, module) layers with its key."""
    for index, layer, module in layers:
        for name, parameter in module.named_parameters():
            yield (index, f"{layer}.{name}"), parameter


def modules_of(kind: type[M], layers: Layers) -> dict[Key, M]:
    """Returns every module of a kind in (index, name, module) layers, the layers themselves among them."""
    return {
        (index, f"{layer}.{name}".rstrip(".")): module
        for index, layer, whole in layers
        for name, module in whole.named_modules()
        if isinstance(module, kind)
    }


def named_buffers(layers: Layers) -> dict[Key, Tensor]:
    return {
        (index, f"{layer}.{name}"): buffer for index, layer, module in layers for name, buffer in module.named_buffers()
    }


def of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose name is ``kind/name``, by the name alone."""
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}
