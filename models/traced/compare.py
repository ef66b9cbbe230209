"""Compares the layers of a traced module with the module itself, run whole by torch's own autograd.

Both sides run the same micro-batches one after the other, on the CPU: in training twice, with an update of the
parameters in between, so that state kept in the module and copies of weights show, then in evaluation. Every operation
that draws random numbers draws those of its name and shapes, so that both sides have the same dropout.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ...layers import LayerBuilder, announce
from ...micro_batch import MicroBatch, Tensors
from .layer import LayerMaker
from .layers import traced_layers
from .module import Called
from .recording import seeded
from .trace import Example

ROUNDING = 1e-4  # relative difference in float32 that still counts as rounding
CEILING = 0.05  # a larger one, of a tensor that is not small, is none, whatever float64 says
SMALL = 1e-3  # times the largest norm of its kind: smaller tensors are measured by this for `CEILING`
NOTHING = 1e-6  # the same in float64, where a smaller gradient is zero but for rounding
COPIES = 6  # of the parameters that a comparison holds at the most: weights and gradients of both sides

Loss = Callable[[Tensors, Tensors], Tensor]  # of outputs and targets
Place = tuple[str, str]  # what it is and its name, as ("gradient", "head.weight")
Values = dict[Place, Tensor]

OUTPUT, GRADIENT, BUFFER, EVALUATED, TRAINED = "output", "gradient", "buffer", "output in evaluation", "requires_grad"
AFTER_UPDATE = " after an update"
KINDS = (TRAINED, OUTPUT, GRADIENT, OUTPUT + AFTER_UPDATE, GRADIENT + AFTER_UPDATE, BUFFER, EVALUATED)


@dataclass(frozen=True)
class Deviation:
    """Describes how far one tensor of the layers is from the module's own.

    Attributes:
        kind, name: what it is, as a gradient, and of what, as a parameter.
        relative: norm of the difference as a share of the module's own norm; 0: the same bits; inf: see ``said``.
        share: the same, but a small tensor is measured by the largest of its kind.
        said: how they differ where that is no number.
    """

    kind: str
    name: str
    relative: float
    share: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}: {self.said or f'relative difference {self.relative:.1e}'}"


@dataclass(frozen=True)
class Comparison:
    """Holds the comparison of the layers with the module itself.

    Attributes:
        compared: number of tensors.
        worst: the largest difference; None where nothing was compared.
        differing: what differs by more than rounding, in the order of `KINDS`.
        decided: what float32 found, where float64 has decided that it is rounding.
    """

    compared: int
    worst: Deviation | None
    differing: list[Deviation]
    decided: str = ""

    @property
    def agrees(self) -> bool:
        return not self.differing


def compare(builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], loss: Loss) -> Comparison:
    """Compares the layers of a traced module with the module itself.

    Where float32 differs by more than rounding usually does, and not by as much as an error would, the comparison is
    made again in float64, whose verdict counts.

    Args:
        builders: as `layers` has returned them.
        micro_batches: that both sides run, in order; each has (inputs, targets).
        loss: whose gradients are compared.

    Raises:
        Exception: what the layers or the module raise.
    """
    gaps = differences(run_layers(builders, micro_batches, loss), run_module(builders, micro_batches, loss))
    found = _judged(gaps, ROUNDING)
    if found.agrees or any(gap.share > CEILING for gap in found.differing):
        return found
    wide = [(_widened(inputs), _widened(targets)) for inputs, targets in micro_batches]
    again = traced_layers(maker_of(builders[0]).traced_from, _example(wide[0][0]), torch.float64)
    gaps = differences(
        run_layers(again, wide, loss, torch.float64), run_module(again, wide, loss, torch.float64), NOTHING
    )
    decided = _judged(gaps, ROUNDING**2)
    return replace(decided, decided=str(found.worst)) if decided.agrees else found


def maker_of(builder: LayerBuilder) -> LayerMaker:
    """Returns what makes a traced layer.

    Raises:
        TypeError: the layer is not of a traced module.
    """
    if not isinstance(builder.build, LayerMaker):
        raise TypeError(f"layer {builder.name} is not of a traced module")
    return builder.build


def _judged(gaps: Sequence[Deviation], limit: float) -> Comparison:
    worst = max(gaps, key=lambda gap: gap.relative, default=None)
    beyond = [gap for gap in gaps if gap.relative > limit]
    return Comparison(len(gaps), worst, sorted(beyond, key=lambda gap: KINDS.index(gap.kind)))


# -- the two sides -----------------------------------------------------------------------------------------------------


def run_module(
    builders: Sequence[LayerBuilder],
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    float_type: torch.dtype = torch.float32,
) -> Values:
    """Returns what the module itself computes from which the layers were traced; see `values_of`.

    Args:
        float_type: in which parameters and buffers are that are float32.
    """
    traced_from = maker_of(builders[0]).traced_from
    with _quiet(), seeded(traced_from.seed):
        called = Called(traced_from.constructor(), traced_from.call)
    return values_of(_widen(called, float_type), lambda: dict(_tensors(called.module)), micro_batches, loss)


def run_layers(
    builders: Sequence[LayerBuilder],
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    float_type: torch.dtype = torch.float32,
) -> Values:
    """Returns what all layers in order compute, without an engine, under the names of the module."""
    announce(builders)
    layers = _InOrder([(_widen(builder.build(), float_type), maker_of(builder).held) for builder in builders])
    return values_of(layers, layers.tensors, micro_batches, loss)


def values_of(
    model: nn.Module,
    tensors: Callable[[], Mapping[str, Tensor]],
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
) -> Values:
    """Runs one side.

    Args:
        model: maps the tensors of a micro-batch to one.
        tensors: returns its parameters and buffers by name.

    Returns:
        The outputs of each micro-batch, the gradients of all, twice; then buffers, and whether parameters are trained;
        then the outputs in evaluation.
    """
    values: Values = {}
    with _quiet(), seeded(0), _SameNoise():
        model.train(True)
        for again in ("", AFTER_UPDATE):
            with _averaged_over_a_mini_batch():
                for number, (inputs, targets) in enumerate(micro_batches):
                    output = model(*(tensor.clone() for tensor in inputs))
                    values[OUTPUT + again, f"micro-batch {number}"] = output.detach().clone()
                    total = loss((output,), targets)
                    if total.requires_grad:
                        total.backward()  # type: ignore[no-untyped-call]  # torch's own
            for name, parameter in tensors().items():
                if parameter.grad is not None:
                    values[GRADIENT + again, name] = parameter.grad
                    parameter.grad = None
                    _move(name, parameter)
        for name, tensor in tensors().items():
            is_parameter = isinstance(tensor, nn.Parameter)
            value = torch.tensor(tensor.requires_grad) if is_parameter else tensor.detach().clone()
            values[TRAINED if is_parameter else BUFFER, name] = value
        model.eval()
        with torch.no_grad():
            for number, (inputs, _) in enumerate(micro_batches):
                values[EVALUATED, f"micro-batch {number}"] = model(*(tensor.clone() for tensor in inputs)).clone()
    return values


class _InOrder(nn.Module):
    """Runs layers one after the other; a parameter of several layers is one."""

    def __init__(self, layers: Sequence[tuple[nn.Module, Mapping[str, str]]]) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layer for layer, _ in layers)
        self._held: list[tuple[nn.Module, str, str]] = []  # holder, name there, name in the module
        owners: dict[str, nn.Parameter | None] = {}
        for layer, held in layers:
            for path, first in held.items():
                way, _, name = path.rpartition(".")
                holder = layer.get_submodule(way)
                self._held.append((holder, name, first))
                if name in holder._parameters:
                    holder._parameters[name] = owners.setdefault(first, holder._parameters[name])

    def forward(self, *tensors: Tensor) -> Any:
        value: Any = tensors[0] if len(tensors) == 1 else tensors
        for layer in self._layers:
            value = layer(value)
        return value

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module."""
        return {first: getattr(holder, name) for holder, name, first in self._held}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _widen(module: nn.Module, float_type: torch.dtype) -> nn.Module:
    return module if float_type is torch.float32 else module.to(float_type)


def _example(inputs: Tensors) -> Example:
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in inputs]


def _widened(tensors: Tensors) -> Tensors:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


@torch.no_grad()
def _move(name: str, parameter: Tensor) -> None:
    """Changes a parameter in place by a hundredth, as an update would, on both sides alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = float(parameter.norm()) / math.sqrt(parameter.numel() or 1)
    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01 * (size + 1e-3))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what the module prints and warns of."""
    prints = StringIO()
    with warnings.catch_warnings(), redirect_stdout(prints), redirect_stderr(prints):
        warnings.simplefilter("ignore")
        yield


class _SameNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Seeds every operation that draws random numbers by its name and shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
            torch.default_generator.manual_seed(zlib.crc32(f"{function} {shapes}".encode()))
        return function(*args, **(kwargs or {}))


@contextmanager
def _averaged_over_a_mini_batch() -> Iterator[None]:
    """Makes BatchNorm's averages follow the pooled statistics of all calls in the context (paper, section 2.2)."""
    batch_norm = F.batch_norm
    seen: dict[int, tuple[Tensor, Tensor, float, list[Tensor]]] = {}  # averages, momentum; count, sums, sums of squares

    def gathering(
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or mean is None or variance is None:
            return batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
        values = x.detach().double().transpose(0, 1).flatten(1)
        sums = torch.stack([torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.square().sum(1)])
        seen.setdefault(id(mean), (mean, variance, momentum, []))[-1].append(sums)
        return batch_norm(x, None, None, weight, bias, True, momentum, eps)

    with patch.object(F, "batch_norm", gathering):
        yield
    with torch.no_grad():
        for mean, variance, momentum, parts in seen.values():
            count, total, squares = torch.stack(parts).sum(0)
            mean.lerp_((total / count).to(mean), momentum)
            variance.lerp_((squares / count - (total / count).square()).to(variance), momentum)


# -- comparing ---------------------------------------------------------------------------------------------------------


def differences(layers: Mapping[Place, Tensor], own: Mapping[Place, Tensor], least: float = 0.0) -> list[Deviation]:
    """Compares what `values_of` has returned for both sides; a buffer that no layer holds has not changed there.

    Args:
        least: of the largest norm of its kind: a smaller tensor counts as so large.
    """
    largest: dict[str, float] = {}
    for (kind, _), value in own.items():
        largest[kind] = max(largest.get(kind, 0.0), _norm(value))
    gaps = []
    for place in dict.fromkeys([*own, *layers]):
        gap = _gap(place, layers.get(place), own.get(place), largest.get(place[0], 0.0), least)
        if gap is not None:
            gaps.append(gap)
    return gaps


def _gap(place: Place, ours: Tensor | None, own: Tensor | None, largest: float, least: float) -> Deviation | None:
    kind, name = place
    if ours is None or own is None:
        present = own if ours is None else ours
        if present is None or kind in (TRAINED, BUFFER):  # a layer holds what it uses
            return None
        if not bool(present.any()):
            return Deviation(kind, name, 0.0)
        return Deviation(
            kind, name, math.inf, math.inf, "none in the traced layers" if ours is None else "none in the module itself"
        )
    if ours.shape != own.shape or ours.dtype != own.dtype:
        shown = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (ours, own)]
        return Deviation(
            kind, name, math.inf, math.inf, f"{shown[0]} in the traced layers, {shown[1]} in the module itself"
        )
    if kind == TRAINED and bool(ours != own):
        return Deviation(
            kind, name, math.inf, math.inf, f"{bool(ours)} in the traced layers, {bool(own)} in the module itself"
        )
    x, y = ours.double(), own.double()
    if not torch.equal(finite := torch.isfinite(x), torch.isfinite(y)):
        return Deviation(kind, name, math.inf, math.inf, "not finite on one side")
    distance, norm = _norm(torch.where(finite, x - y, 0.0)), _norm(torch.where(finite, y, 0.0))
    return Deviation(
        kind,
        name,
        distance / max(norm, least * largest, 1e-30) if distance else 0.0,
        distance / max(norm, SMALL * largest, 1e-30) if distance else 0.0,
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(tensor.double()), tensor.double(), 0.0)))
