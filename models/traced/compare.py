"""Compares the layers of a traced module with the module itself, run whole by torch's own autograd.

Both sides run the same micro-batches one after the other, on the CPU: in training twice, with an update of the
parameters in between, so that state kept in the module and copies of weights show, then in evaluation. Every operation
that draws random numbers draws those of its name and shapes, so that both sides have the same dropout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ...difference import MISSING, NO_LAYER, Gap, Key, Quantity, judge_tensors, may_be_rounding, measure
from ...layers import LayerBuilder, announce
from ...micro_batch import MicroBatch, Tensors
from .layers import LayerMaker, traced_layers
from .module import Called, TracedFrom
from .recording import quiet, seeded
from .trace import Example

ROUNDING = 1e-4  # relative difference in float32 that still counts as rounding; of a tensor however small
CEILING, CEILING_OF_GRADIENTS = 1e-3, 0.05  # more is none, whatever float64 says
SMALL = 1e-3  # share of all of its kind by which a smaller tensor is measured for the ceiling
NOTHING = 1e-6  # the same in float64, where a smaller gradient is zero but for rounding
COPIES = 6  # of the parameters that a comparison holds at the most: weights and gradients of both sides

Loss = Callable[[Tensors, Tensors], Tensor]  # of outputs and targets
Run = Callable[[], Iterable[Tensor]]
Named = Callable[[], Mapping[str, Tensor]]
Place = tuple[str, str]  # what it is and its name, as ("gradient", "head.weight")
Values = dict[Place, Tensor]
Gaps = dict[str, list[tuple[Key, Gap]]]  # by kind
Compared = tuple[Quantity, str]  # see `decide`

OUTPUT, GRADIENT, BUFFER, EVALUATED, TRAINED = "output", "gradient", "buffer", "output in evaluation", "requires_grad"
AFTER_UPDATE = " after an update"
ONCE = (TRAINED, OUTPUT, GRADIENT, BUFFER, EVALUATED)
KINDS = (*ONCE, *(kind + AFTER_UPDATE for kind in ONCE))
CEILINGS = {GRADIENT: CEILING_OF_GRADIENTS, GRADIENT + AFTER_UPDATE: CEILING_OF_GRADIENTS}


class ModuleFailed(Exception):
    """Raised when the module itself fails where its layers do not; has the module's own exception as its cause."""


def compare(builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], loss: Loss) -> Compared:
    """Compares the layers of a traced module with the module itself.

    Args:
        builders: as `layers` has returned them.
        micro_batches: that both sides run, in order; each has (inputs, targets).
        loss: whose gradients are compared.

    Raises:
        ModuleFailed: the module itself raises, its layers do not.
        Exception: what the layers raise.
    """
    traced_from = maker_of(builders[0]).traced_from

    def run(float_type: torch.dtype) -> tuple[Values, Values]:
        given = [(widened(inputs, float_type), widened(targets, float_type)) for inputs, targets in micro_batches]
        is_wide = float_type is not torch.float32
        traced = traced_layers(traced_from, example_of(given[0][0]), float_type) if is_wide else builders
        layers = _InOrder(traced)
        ours = _run(_widen(layers, float_type), layers.tensors, given, loss)
        try:
            return ours, run_module(traced_from, given, loss, float_type)
        except Exception as error:
            raise ModuleFailed from error

    return decide(run)


def decide(run: Callable[[torch.dtype], tuple[Values, Values]]) -> Compared:
    """Compares two sides.

    Where float32 differs by more than rounding usually does, and not by as much as an error would, float64 decides.

    Args:
        run: returns `values_of` the layers, and of the module itself, whose float32 is the type that it is given. Where
            it fails in float64, as the code of some modules holds types, float32 decides.

    Returns:
        All that was compared, and where float64 has decided, what float32 had found.
    """
    gaps = differences(*run(torch.float32))
    found = _together(judge(gaps, ROUNDING))
    if found.beyond and may_be_rounding(judge(gaps, ROUNDING, SMALL), CEILINGS, CEILING):
        with suppress(Exception):
            wide = _together(judge(differences(*run(torch.float64)), ROUNDING**2, NOTHING))
            if not wide.beyond:
                return wide, str(found.worst)
    return found, ""


def maker_of(builder: LayerBuilder) -> LayerMaker:
    """Returns what makes a layer of a traced module."""
    assert isinstance(builder.build, LayerMaker), builder.name
    return builder.build


# -- one side ----------------------------------------------------------------------------------------------------------


def run_module(
    traced_from: TracedFrom, micro_batches: Sequence[MicroBatch], loss: Loss, float_type: torch.dtype
) -> Values:
    """Returns what the module itself computes.

    Args:
        float_type: in which parameters and buffers are that are float32.
    """
    with quiet(), seeded(traced_from.seed):
        called = Called(traced_from.constructor(), traced_from.call)
    module = called.module
    _widen(called, float_type)
    return _run(
        called, lambda: {**dict(module.named_parameters()), **dict(module.named_buffers())}, micro_batches, loss
    )


def _run(model: nn.Module, tensors: Named, micro_batches: Sequence[MicroBatch], loss: Loss) -> Values:
    """Runs a plain loop over the micro-batches, as often as `values_of` asks for."""

    def train() -> Iterator[Tensor]:
        model.train()
        with averaged_over_a_mini_batch(model):
            for inputs, targets in micro_batches:
                output = model(*(tensor.clone() for tensor in inputs))
                yield output.detach().clone()
                total = loss((output,), targets)
                if total.requires_grad:
                    total.backward()  # type: ignore[no-untyped-call]  # torch's own

    def evaluate() -> Iterator[Tensor]:
        model.eval()
        for inputs, _ in micro_batches:
            yield model(*(tensor.clone() for tensor in inputs)).clone()

    return values_of(train, evaluate, tensors)


def values_of(train: Run, evaluate: Run, tensors: Named) -> Values:
    """Trains twice, with an update of the parameters in between, and evaluates after each.

    Args:
        train: runs a mini-batch and leaves its gradients at the parameters; returns the micro-batches' outputs.
        evaluate: returns the same micro-batches' outputs in evaluation.
        tensors: returns parameters and buffers by their first name in the module.

    Returns:
        All that `KINDS` lists.
    """
    values: Values = {}
    with quiet(), seeded(0), _SameNoise():
        for again in ("", AFTER_UPDATE):
            for number, output in enumerate(train()):
                values[OUTPUT + again, f"micro-batch {number}"] = output
            for name, tensor in tensors().items():
                if not isinstance(tensor, nn.Parameter):
                    values[BUFFER + again, name] = tensor.detach().clone()
                    continue
                values[TRAINED + again, name] = torch.tensor(tensor.requires_grad)
                if tensor.grad is not None:
                    values[GRADIENT + again, name] = tensor.grad
                    tensor.grad = None
            with torch.no_grad():
                for number, output in enumerate(evaluate()):
                    values[EVALUATED + again, f"micro-batch {number}"] = output
            for name, tensor in tensors().items():
                if (GRADIENT, name) in values and bool(values[GRADIENT, name].any()):
                    _move(name, tensor)
    return values


class _InOrder(nn.Module):
    """Runs all layers one after the other, under the names of the module; a parameter of several layers is one."""

    def __init__(self, builders: Sequence[LayerBuilder]) -> None:
        super().__init__()
        announce(builders)
        self._layers = nn.ModuleList(builder.build() for builder in builders)
        self._held: list[tuple[nn.Module, str, str]] = []  # holder, name there, name in the module
        owners: dict[str, nn.Parameter | None] = {}
        for layer, builder in zip(self._layers, builders, strict=True):
            for path, first in maker_of(builder).held.items():
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
        found: dict[str, Tensor] = {}
        for holder, name, first in self._held:
            tensor = getattr(holder, name)
            same = found.get(first) is tensor or first not in found or torch.equal(found[first], tensor)
            found[first] = tensor if same else torch.empty(0)  # layers have made different buffers of one
        return found


def _widen(module: nn.Module, float_type: torch.dtype) -> nn.Module:
    return module if float_type is torch.float32 else module.to(float_type)


def example_of(inputs: Tensors) -> Example:
    """Returns dtype and shape of each tensor."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in inputs]


def widened(tensors: Tensors, float_type: torch.dtype) -> Tensors:
    """Returns floating-point tensors in another type than float32; for float32 all as they are."""
    wide = float_type is not torch.float32
    return tuple(tensor.to(float_type) if wide and tensor.is_floating_point() else tensor for tensor in tensors)


@torch.no_grad()
def _move(name: str, parameter: Tensor) -> None:
    """Changes a parameter in place by a hundredth, as an update would, on both sides alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = float(parameter.norm()) / math.sqrt(parameter.numel() or 1)
    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01 * (size + 1e-3))


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
def averaged_over_a_mini_batch(model: nn.Module) -> Iterator[None]:
    """Makes BatchNorm's averages follow the pooled statistics of all calls in the context (paper, section 2.2).

    The context counts as one batch.
    """
    seen: dict[_BatchNorm, list[Tensor]] = {}  # count, sums and sums of squares of each call
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    before = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}

    def gather(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if norm.training:
            values = inputs[0].detach().double().transpose(0, 1).flatten(1)
            sums = torch.stack([torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.square().sum(1)])
            seen.setdefault(norm, []).append(sums)  # type: ignore[arg-type]

    with ExitStack() as hooks:
        for norm in norms:
            hooks.enter_context(norm.register_forward_pre_hook(gather))
        yield
    with torch.no_grad():
        for norm, parts in seen.items():
            for name, buffer in norm.named_buffers():
                buffer.copy_(before[norm][name])
            counter, mean, variance = map(norm.get_buffer, ("num_batches_tracked", "running_mean", "running_var"))
            counter += 1
            momentum = 1 / float(counter) if norm.momentum is None else norm.momentum
            values, total, squares = torch.stack(parts).sum(0)
            mean.lerp_((total / values).to(mean), momentum)
            variance.lerp_((squares / values - (total / values).square()).to(variance), momentum)


# -- comparing ---------------------------------------------------------------------------------------------------------


def judge(gaps: Gaps, tolerance: float, small: float = 0.0) -> list[Quantity]:
    """Judges what `differences` has returned, kind by kind; see `judge_tensors`."""
    return [judge_tensors(kind, gaps[kind], tolerance, small) for kind in KINDS if kind in gaps]


def _together(found: Sequence[Quantity]) -> Quantity:
    worst = max((quantity.worst for quantity in found if quantity.worst), key=lambda d: d.relative, default=None)
    beyond = [difference for quantity in found for difference in quantity.beyond]
    return Quantity("all", sum(quantity.compared for quantity in found), worst, beyond)


def differences(layers: Mapping[Place, Tensor], own: Mapping[Place, Tensor]) -> Gaps:
    """Measures what `values_of` has returned for both sides; a buffer that no layer holds has not changed there."""
    gaps: Gaps = {}
    for kind, name in dict.fromkeys([*own, *layers]):
        gap = _gap(kind.removesuffix(AFTER_UPDATE), layers.get((kind, name)), own.get((kind, name)))
        if gap is not None:
            gaps.setdefault(kind, []).append(((NO_LAYER, f"{kind} of {name}"), gap))
    return gaps


def _gap(kind: str, ours: Tensor | None, own: Tensor | None) -> Gap | None:
    """Returns how far two values are apart; None where they are not compared."""
    if ours is None or own is None:
        present = own if ours is None else ours
        if present is None or kind in (TRAINED, BUFFER):  # constants of a layer, tables made at first use
            return None
        return MISSING if bool(present.any()) else measure(present, present)
    return measure(ours, own) if ours.dtype == own.dtype and (kind != TRAINED or bool(ours == own)) else MISSING
