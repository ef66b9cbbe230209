"""Records one training step so that two ways to run it can be compared.

What passes through the layers is kept as fingerprints, one for each micro-batch, and numbers as they are. Tensors of
the model's size (weights, gradients, optimizer state) are not kept here but in files (`spill.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch

from ..difference import Gap, Key
from ..micro_batch import Tensors

M = TypeVar("M", bound=nn.Module)
Place = tuple[int, int]  # (replica, micro-batch)
Call = tuple[int, int, int]  # (replica, micro-batch, layer)
Layers = Iterable[tuple[int, str, nn.Module]]  # index, name, module

# What is seen of a step. By point: a layer's output, the gradient of its output, the weights that it used, what the
# first layer of a cell was given. By call: the seed of its random numbers, and its mode. With `AGAIN` behind it: the
# same in recompute.
OUTPUT, GRADIENT, WEIGHTS, INPUT, SEED, MODE = "output", "gradient", "weights", "input", "seed", "mode"
AGAIN = " in recompute"
# By key: the learning rate and the norm of the gradient that the optimizer was given for each parameter. By replica and
# key: all that is held after the step.
RATE, USED, HELD = "rate", "used", "held"
Seen = dict[str, dict[Any, Any]]
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

    def gap(self, right: Fingerprint) -> Gap:
        """Returns how far this fingerprint is from the one that it should equal."""
        ours, plain = (norm if math.isfinite(norm) else 0.0 for norm in (self.norm, right.norm))
        return Gap(number_gap(self.norm, right.norm), self.distance(right), ours, plain, plain, 0.0)


class Point(NamedTuple):
    """Identifies a fingerprint: replica, micro-batch, layer, and the number of the tensor in the layer."""

    replica: int
    micro_batch: int
    layer: int
    number: int


@dataclass
class RecordedStep:
    """Holds the record of one training step, of one worker or of the whole model.

    Attributes:
        loss: of the mini-batch, per unit of weight.
        losses: unscaled sums by (replica, micro-batch).
        statistics: sums of the task's statistics.
        gradient_norm: global, before clipping.
        loss_scale: factor of what passes back between layers.
        seen: of the layers and the update.
    """

    loss: float = math.nan
    losses: dict[Place, float] = field(default_factory=dict)
    statistics: Sequence[float] = ()
    gradient_norm: float = math.nan
    loss_scale: float = 1.0
    seen: Seen = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def write(self, path: Path) -> None:
        """Writes what is seen to a file, for `add`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.seen, path)

    def add(self, path: Path) -> None:
        """Adds what another worker has seen."""
        with torch.serialization.safe_globals([Point, Fingerprint]):
            for kind, found in torch.load(path, weights_only=True).items():
                self.seen.setdefault(kind, {}).update(found)


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


class Recorder:
    """Collects what is seen of one step, on either side."""

    def __init__(self) -> None:
        self._seen: Seen = defaultdict(dict)
        self._known: dict[int, tuple[int, int, Fingerprint]] = {}  # of a parameter: address, version, fingerprint

    def note(self, kind: str, at: Any, value: Any) -> None:
        """Records one value."""
        self._seen[kind][at] = value

    def take(self) -> Seen:
        """Returns the record since the last call."""
        seen, self._seen, self._known = dict(self._seen), defaultdict(dict), {}
        return seen

    def weights(self, kind: str, call: Call, weights: Iterable[Tensor]) -> None:
        """Records the weights of a layer, before it runs."""
        for number, parameter in enumerate(weights):
            address, version, mark = self._known.get(id(parameter), (0, -1, None))
            if mark is None or (address, version) != (parameter.data_ptr(), parameter._version):
                with no_dispatch(), torch._C.DisableTorchFunction():  # WeightCasts would count this reading as a use
                    mark = fingerprint(parameter)
                self._known[id(parameter)] = parameter.data_ptr(), parameter._version, mark
            self.note(kind, Point(*call, number), mark)

    def outputs(self, kind: str, call: Call, outputs: Tensors, inputs: Tensors) -> None:
        """Records what a layer returned and, during backward, the gradient of each new tensor."""
        for number, tensor in enumerate(outputs):
            point = Point(*call, number)
            self.note(kind, point, fingerprint(tensor))
            if tensor.requires_grad and not any(tensor is one for one in inputs):
                tensor.register_hook(partial(self._gradient, point))  # type: ignore[no-untyped-call]  # torch's own

    def _gradient(self, point: Point, gradient: Tensor) -> None:
        """Records the first gradient only: a schedule that divides backward may call the hook twice."""
        if point not in self._seen[GRADIENT]:
            self.note(GRADIENT, point, fingerprint(gradient))


def mode_of(module: nn.Module, device: torch.device) -> str:
    """Returns how a layer runs: in training or evaluation mode, and with which autocast."""
    still = [name or "itself" for name, part in module.named_modules() if not part.training]
    cast = str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "no"
    mode = f"in evaluation mode ({still[0]})" if still else "in training mode"
    return f"{mode} with {cast.removeprefix('torch.')} autocast"


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
