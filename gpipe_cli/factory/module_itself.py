"""Compares the layers of a traced module with the module itself, run whole by torch's own autograd.

The layers run as cells run them: the engine has a cell for each, so that a cut lies at every place, and computes each
forward again for its backward. The module itself runs in a plain loop. Both get the same calls one after the other on
the CPU, and keep what they keep: training and evaluation in turns, other examples in each, as few and as many as a run
has, and in between updates by the run's own optimizer. After each call all that can be named is compared.

Every operation that draws random numbers draws those of the call, its name and its shapes, so that both sides have the
same dropout, and another in each call.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..cpu import seeded
from ..difference import MISSING, NO_LAYER, Gap, Key, Quantity, judge_tensors, may_be_rounding, measure
from ..layers import LayerBuilder, announce
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.layers import LayerMaker, traced_layers
from ..models.traced.module import Called, TracedFrom
from ..models.traced.recording import Generators, plainly, quiet
from ..models.traced.trace import INSIDE, Example
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.cell import BuiltLayer, Cell
from ..pipeline.engine import Engine
from ..pipeline.randomness import NoiseSource
from ..pipeline.step import StepPlan
from ..schedule.schedule import forward_only, schedule
from .counts import Counts, Place
from .wrappers import widened

ROUNDING = 1e-4  # relative difference in float32 that still counts as rounding; of a tensor however small
CEILING, CEILING_OF_GRADIENTS = 1e-3, 0.05  # more is none, whatever float64 says
SMALL = 1e-3  # share of all of its kind by which a smaller tensor is measured for the ceiling
NOTHING = 1e-6  # the same in float64, where a smaller gradient is zero but for rounding
COPIES = 8  # of the parameters that a comparison holds: weights, gradients and an optimizer's state of both sides
EXAMPLES = 2  # of most calls; BatchNorm needs two
CALLS = "TTETuLTETuSTETuTTETuTTETE"  # Trains or Evaluates on EXAMPLES, trains on a run's Largest, Smallest; update
AHEAD = 10**6  # times by which numbers that calls have changed are put ahead

Loss = Callable[[Tensors, Tensors], Tensor]  # of outputs and targets
MakeOptimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]  # of named parameters; freezes some
Gaps = dict[str, list[tuple[Key, Gap]]]  # by kind and call
OUTPUT, GRADIENT, BUFFER, TRAINED = "output", "gradient", "buffer", "requires_grad"
PARAMETER, DRAWN = "parameter", "numbers drawn from a generator"


class ModuleFailed(Exception):
    """Raised when the module itself fails where its layers do not; has the module's own exception as its cause."""


@dataclass(frozen=True)
class Given:
    """Holds the micro-batches, loss and optimizer that both sides get from a run.

    Attributes:
        micro_batches: of a mini-batch, each (inputs, targets).
        loss: whose gradients are compared.
        optimizer: makes the run's own for named parameters, of which it freezes those that do not learn.
    """

    micro_batches: Sequence[MicroBatch]
    loss: Loss
    optimizer: MakeOptimizer

    def call(self, which: str, number: int) -> MicroBatch:
        """Returns the micro-batch of a call: the largest, the smallest, or a few examples, others in each call."""
        in_order = sorted(self.micro_batches, key=lambda micro_batch: micro_batch[0][0].numel())
        if which in "LS":
            return in_order[-1 if which == "L" else 0]
        start, examples = EXAMPLES * number, 1 if which in "te" else EXAMPLES

        def some(tensor: Tensor) -> Tensor:
            return tensor.roll(-start, 0)[:examples] if tensor.dim() else tensor

        inputs, targets = in_order[-1]
        return tuple(map(some, inputs)), tuple(map(some, targets))

    def examples(self, calls: str) -> int:
        """Returns the number of examples of all calls of these kinds."""
        return sum(len(self.call(which, 0)[0][0]) for which in CALLS if which in calls)


@dataclass(frozen=True)
class Compared:
    """Says how the two sides compare.

    Attributes:
        all: that was compared.
        float32: where float64 has decided, what float32 had found.
        fewest: examples that a micro-batch must have; 2: with one, the layers do something else.
    """

    all: Quantity
    float32: str = ""
    fewest: int = 1


def compare(builders: Sequence[LayerBuilder], given: Given) -> Compared:
    """Compares the layers of a traced module with the module itself.

    Where float32 differs by more than rounding usually does, and not by as much as an error would, float64 decides.
    Where that fails, as the code of some modules holds types, a tensor counts that is not small beside all of its kind.

    Raises:
        ModuleFailed: the module itself raises, its layers do not.
        Exception: what the layers raise.
    """
    calls = _Calls(_Layers(builders, given), Itself(maker_of(builders[0]).traced_from, given), given)
    gaps = calls.run()
    found = _together(judge(gaps, ROUNDING))
    ceilings = {kind: CEILING_OF_GRADIENTS for kind in gaps if GRADIENT in kind}
    small, float32 = judge(gaps, ROUNDING, SMALL), ""
    if found.beyond and may_be_rounding(small, ceilings, CEILING):
        try:
            wide = _together(judge(_in_float64(maker_of(builders[0]).traced_from, given).run(), ROUNDING**2, NOTHING))
            found, float32 = (found, "") if wide.beyond else (wide, str(found.worst))
        except Exception:
            found = _together(small)
    return Compared(found, float32, 1 if found.beyond else calls.fewest())


def maker_of(builder: LayerBuilder) -> LayerMaker:
    """Returns the maker of a layer of a traced module."""
    assert isinstance(builder.build, LayerMaker), builder.name
    return builder.build


# -- the two sides -----------------------------------------------------------------------------------------------------


class _Layers:
    """Runs all layers by the engine, each in a cell of its own; a parameter of several layers is one."""

    def __init__(self, builders: Sequence[LayerBuilder], given: Given, float_type: torch.dtype = torch.float32) -> None:
        announce(builders)
        modules = [_widened(builder.build(), float_type) for builder in builders]
        for tensor in (tensor for module in modules for tensor in (*module.parameters(), *module.buffers())):
            tensor.data = tensor.data.clone()  # as workers share no memory
        self._held = [maker_of(builder).held for builder in builders]
        owners: dict[str, nn.Parameter] = {}
        for module, held in zip(modules, self._held, strict=True):
            for path, first in held.items():
                way, _, name = path.rpartition(".")
                own = module.get_submodule(way)._parameters
                if (parameter := own.get(name)) is not None:
                    own[name] = owners.setdefault(first, parameter)
        cpu, placement, targets = torch.device("cpu"), [0] * len(modules), len(given.micro_batches[0][1])
        layers = [BuiltLayer(i, builder.name, modules[i]) for i, builder in enumerate(builders)]
        self._cells = [Cell(layer.index, [layer], NoiseSource(0, 0, cpu)) for layer in layers]
        self._engine = Engine(self._cells, placement, None, self._score, targets, cpu)
        (self._training,), (self._evaluation,) = schedule("gpipe", placement, 1, placement), forward_only(placement, 1)
        self._loss, self._output, self.optimizer = given.loss, torch.empty(0), given.optimizer([*owners.items()])

    def _score(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        self._output = outputs[0].detach().clone()
        return self._loss(outputs, targets), torch.zeros(0)

    def _keep(self, _: int, outputs: Tensors, targets: Tensors) -> None:
        self._output = outputs[0].clone()

    def call(self, trains: bool, micro_batch: MicroBatch) -> Tensor:
        """Returns the output; in training, adds gradients to the parameters'."""
        for cell in self._cells:
            cell.train(trains)
        signatures = ((trains, *(tensor.shape for side in micro_batch for tensor in side)),)
        if trains:
            self._engine.train_step(self._training, StepPlan(signatures, 1.0, micro_batches=[micro_batch]))
            finish_batchnorm([norm for cell in self._cells for norm in cell.batchnorms], None)
        else:
            self._engine.run_forward(self._evaluation, signatures, [micro_batch], self._keep)
        return self._output

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module."""
        found: dict[str, Tensor] = {}
        for cell, held in zip(self._cells, self._held, strict=True):
            for path, first in held.items():
                tensor = attrgetter(path)(cell.layers[0].module)
                same = found.get(first) is tensor or first not in found or torch.equal(found[first], tensor)
                found[first] = tensor if same else torch.empty(0)  # layers have made different buffers of one
        return found


class Itself:
    """Runs the module itself in a plain loop; BatchNorm's averages follow whole mini-batches."""

    def __init__(self, traced_from: TracedFrom, given: Given, float_type: torch.dtype = torch.float32) -> None:
        with quiet(), seeded(traced_from.seed):
            self._called = Called(traced_from.constructor(), traced_from.call)
        with torch.no_grad():
            self._called.train()
        _widened(self._called, float_type)
        module = self.module = self._called.module
        names = {id(parameter): name for name, parameter in nn.Module.named_parameters(module)}
        named = [(names.get(id(parameter), ""), parameter) for parameter in module.parameters()]
        self._loss, self.optimizer = given.loss, given.optimizer(named)

    def call(self, trains: bool, *micro_batches: MicroBatch) -> list[Tensor]:
        """Returns the outputs; in training, adds gradients of the mean loss to the parameters'."""
        returned = []
        with plainly(), averaged_over_a_mini_batch(self._called), torch.set_grad_enabled(trains):
            if self._called.training is not trains:  # as loops do: what forward changes stays until then
                self._called.train(trains)
            for inputs, targets in micro_batches:
                output: Tensor = self._called(*(tensor.clone() for tensor in inputs))
                returned.append(output.detach().clone())
                if trains and (total := self._loss((output,), targets) / len(micro_batches)).requires_grad:
                    total.backward()  # type: ignore[no-untyped-call]  # torch's own
        return returned

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module."""
        named: dict[str, Tensor] = dict(self._called.named_parameters())
        named |= dict(self._called.named_buffers())
        return {name.removeprefix(INSIDE): tensor for name, tensor in named.items()}


def _in_float64(traced_from: TracedFrom, given: Given) -> _Calls:
    given = replace(given, micro_batches=[*map(widened, given.micro_batches)])
    builders = traced_layers(traced_from, example_of(given.micro_batches[0][0]), torch.float64)
    return _Calls(_Layers(builders, given, torch.float64), Itself(traced_from, given, torch.float64), given)


def _widened(module: nn.Module, float_type: torch.dtype) -> nn.Module:
    return module if float_type is torch.float32 else module.to(float_type)


def example_of(inputs: Tensors) -> Example:
    """Returns dtype and shape of each tensor."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in inputs]


# -- the calls ---------------------------------------------------------------------------------------------------------


class _Calls:
    """Calls both sides alike, and measures after each call how far they are apart."""

    def __init__(self, layers: _Layers, itself: Itself, given: Given) -> None:
        self._sides, self._itself, self._given = (layers, itself), itself, given
        self._gaps: Gaps = {}
        self._number = 0  # of the last call
        self._ahead = ""  # what of the module is put ahead
        self._trained: set[str] = set()  # parameters that have had a gradient
        self._generators = Generators()

    def run(self) -> Gaps:
        """Runs all calls and updates; returns how far the two sides are apart after each."""
        counts, before = Counts(self._itself.module), dict[Place, Any]()
        with quiet(), seeded(0):
            for which in CALLS:
                if which == "u":
                    self._update()
                else:
                    self._call(which)
                before = before or counts.values()
            moved = {place: now for place, now in counts.values().items() if bool(now != before.get(place, now))}
            with suppress(Exception):  # then a run stops, too
                counts.put({place: now + (now - before[place]) * AHEAD for place, now in moved.items()})
                self._ahead = f" (with {counts.named(moved)} far ahead)"
                for which in "ET" if moved else "":
                    self._call(which)
            counts.put(moved)
        return self._gaps

    def fewest(self) -> int:
        """Returns 2 where both sides differ with one example, else 1; nothing may be called after it."""
        if any(len(inputs[0]) == 1 for inputs, _ in self._given.micro_batches):
            return 1
        with quiet(), seeded(0):
            for which in "te":
                self._gaps = {}
                try:
                    self._call(which)
                except ModuleFailed:
                    return 2
                except Exception:  # then a run stops, too
                    continue
                if _together(judge(self._gaps, CEILING, SMALL)).beyond:
                    return 2
        return 1

    def _call(self, which: str) -> None:
        self._number += 1
        layers, itself = self._sides
        trains, micro_batch = which not in "Ee", self._given.call(which, self._number)
        with SameNoise(self._number):
            ours, before = layers.call(trains, micro_batch), torch.get_rng_state()
            self._generators.drawn_from()
            try:
                (own,) = itself.call(trains, micro_batch)
            except Exception as error:
                raise ModuleFailed from error
            drawn = self._generators.drawn_from()
            if not torch.equal(before, torch.get_rng_state()):  # each operation has restored it
                drawn.add("torch, which forward seeds")
        place = f"call {self._number}{self._ahead}, {'training' if trains else 'evaluation'}: "
        self._measure(place + OUTPUT, {"": ours}, {"": own})
        self._measure(place + DRAWN, {}, dict.fromkeys(drawn, torch.ones(1)))
        held = [by_kind(side.tensors()) for side in self._sides]
        for kind in (TRAINED, BUFFER, GRADIENT)[: 2 + trains]:
            self._measure(place + kind, held[0][kind], held[1][kind])
        self._trained |= {name for name, gradient in held[1][GRADIENT].items() if bool(gradient.any())}

    @torch.no_grad()
    def _update(self) -> None:
        """Updates both sides by the run's optimizer from the same gradients, and moves what is trained further."""
        ours, own = (side.tensors() for side in self._sides)
        both = ours.keys() & own.keys()
        for name in both:
            if (gradient := ours[name].grad) is not None and (other := own[name].grad) is not None:
                gradient.copy_(other)
        for side in self._sides:
            side.optimizer.step()
        held = [by_kind(side)[PARAMETER] for side in (ours, own)]
        self._measure(f"update after call {self._number}: {PARAMETER}", *held)
        for name in held[0].keys() & held[1].keys():
            ours[name].grad = own[name].grad = None
            if name in self._trained:
                _move(name, own[name])
            if ours[name].shape == own[name].shape:
                ours[name].copy_(own[name])  # so that rounding does not add up

    def _measure(self, kind: str, ours: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        for name in dict.fromkeys([*own, *ours]):
            gap = _gap(kind.rpartition(": ")[2], ours.get(name), own.get(name))
            if gap is not None:
                where = f"{kind} of {name}" if name else kind
                self._gaps.setdefault(kind, []).append(((NO_LAYER, where), gap))


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns the compared tensors of parameters and buffers, by kind and name."""
    parameters: dict[str, Tensor] = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    return {
        PARAMETER: parameters,
        BUFFER: {name: tensor for name, tensor in tensors.items() if name not in parameters},
        TRAINED: {name: torch.tensor(parameter.requires_grad) for name, parameter in parameters.items()},
        GRADIENT: {name: p.grad.to_dense() for name, p in parameters.items() if p.grad is not None},
    }


def _move(name: str, parameter: Tensor) -> None:
    """Changes a parameter in place by a hundredth, so that copies of old values show whatever the learning rate."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = float(parameter.norm()) / math.sqrt(parameter.numel() or 1)
    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01 * (size + 1e-3))


class SameNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Gives every operation that draws random numbers those of a call, its name and shapes; restores the generator."""

    def __init__(self, call: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
        name = function._schema.name.removesuffix("_")  # an operation in place draws the same numbers
        given = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]  # numbers go in memory's order
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(zlib.crc32(f"{self._call} {name} {shapes}".encode()))
        answer = function(*given, **(kwargs or {}))
        torch.set_rng_state(state)
        return args[0].copy_(answer) if args and answer is given[0] is not args[0] else answer


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


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(gaps: Gaps, tolerance: float, small: float = 0.0) -> list[Quantity]:
    """Judges measured tensors, kind by kind; see `judge_tensors`."""
    return [judge_tensors(kind, found, tolerance, small, kind=lambda _: None) for kind, found in gaps.items()]


def _together(found: Sequence[Quantity]) -> Quantity:
    worst = max((quantity.worst for quantity in found if quantity.worst), key=lambda d: d.relative, default=None)
    beyond = [difference for quantity in found for difference in quantity.beyond]
    return Quantity("all", sum(quantity.compared for quantity in found), worst, beyond)


def _gap(kind: str, ours: Tensor | None, own: Tensor | None) -> Gap | None:
    """Returns how far two values are apart; None where they are not compared."""
    if ours is None or own is None:
        return None if kind in (TRAINED, BUFFER) else MISSING  # constants of a layer, tables made at first use
    if ours.dtype == own.dtype and torch.equal(ours, own):  # often, and faster than `measure`
        size = float(torch.linalg.vector_norm(own.detach().float()))
        return Gap(0.0, 0.0, size, size, size, 0.0)
    return measure(ours, own) if ours.dtype == own.dtype and (kind != TRAINED or bool(ours == own)) else MISSING
