"""Compares the layers of a traced module with the module itself, run whole by torch's own autograd.

As a careful user would by hand: a few calls of both, of two examples and of a run's largest and smallest micro-batch,
in training and in evaluation, in the run's precision, with updates by its optimizer in between. Both run in a plain
loop on the CPU, the layers one by one, as if a cut lay at every place: what passes between them is laid out as a
message would be, and each is computed again for its backward. After each call all that can be named is compared.

Every operation that draws random numbers draws those of the call, its name and its shapes, so that both sides have the
same dropout, and another in each call. What it cannot see: what begins after more calls than are compared, what few
values of the inputs bring about, and what only a GPU computes otherwise.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..cpu import seeded
from ..layers import LayerBuilder, announce
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.layers import LayerMaker
from ..models.traced.module import Called, TracedFrom, autocast_of
from ..models.traced.recording import quiet
from ..models.traced.trace import SizeError
from ..pipeline.messages.boundary import as_argument, as_tensors, canonical
from .difference import MISSING, NO_LAYER, SMALL_SHARE, Gap, Key, Quantity, judge_tensors, measure

ROUNDING = 1e-3  # relative difference that counts as rounding
OF_HALF, GRADIENT_OF_HALF, SMALL_OF_HALF = 0.03, 0.1, 0.05  # the same in 16 bits, and what counts as small there
COPIES = 8  # copies of the parameters in memory: weights, gradients and an optimizer's state of both sides
FEW, LARGEST, SMALLEST, ONE, SHORT = "two examples", "largest", "smallest", "one example", "length 1"
CALLS = (  # (whether it trains, which micro-batch); None: an update of both sides
    *((True, FEW), (True, LARGEST), (False, LARGEST), None, (True, SMALLEST), (False, FEW), None),
    *((True, FEW), (False, SMALLEST)),
)

Loss = Callable[[Tensors, Tensors], Tensor]  # of outputs and targets
MakeOptimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]  # of named parameters; freezes some
OUTPUT, GRADIENT, BUFFER, TRAINED = "output", "gradient", "buffer", "requires_grad"
PARAMETER, DRAWN = "parameter", "numbers drawn from a generator"


@dataclass(frozen=True)
class Given:
    """Holds what both sides get from a run.

    Attributes:
        micro_batches: one mini-batch, each micro-batch (inputs, targets).
        loss: function whose gradients are compared.
        optimizer: makes the run's own for named parameters, of which it freezes those that do not learn.
    """

    micro_batches: Sequence[MicroBatch]
    loss: Loss
    optimizer: MakeOptimizer

    def call(self, which: str, number: int) -> MicroBatch:
        """Returns the micro-batch of a call.

        Args:
            which: one of `FEW`, `LARGEST`, `SMALLEST`, `ONE` and `SHORT`.
            number: number of the call; `FEW`, `ONE` and `SHORT` take other examples in each.
        """
        in_order = sorted(self.micro_batches, key=lambda micro_batch: micro_batch[0][0].numel())
        inputs, targets = in_order[0 if which == SMALLEST else -1]
        if which in (LARGEST, SMALLEST):
            return inputs, targets

        def some(tensor: Tensor) -> Tensor:
            taken = torch.cat([tensor, tensor]).roll(-2 * number, 0)[: 1 if which == ONE else 2]
            is_text = tensor.dim() == 2 and not tensor.is_floating_point()
            return taken[:, :1] if which == SHORT and is_text else taken

        return tuple(some(t) if t.dim() else t for t in inputs), tuple(some(t) if t.dim() else t for t in targets)


class Compared(NamedTuple):
    """Holds how far the two sides differ, and which inputs make them differ.

    Attributes:
        found: everything that was compared.
        fewest: examples that a micro-batch must have; 2 if the sides differ with one.
        shortest: tokens that a text must have; 2 if the sides differ with one.
    """

    found: Quantity
    fewest: int = 1
    shortest: int = 1


def compare(builders: Sequence[LayerBuilder], given: Given) -> Compared:
    """Compares the layers of a traced module with the module itself.

    Raises:
        Exception: one side raised it.
    """
    calls = _Calls(builders, given)
    found = calls.run()
    return Compared(found) if found.beyond else Compared(found, *(1 + calls.differ(which) for which in (ONE, SHORT)))


def maker_of(builder: LayerBuilder) -> LayerMaker:
    """Returns the maker of a layer of a traced module."""
    assert isinstance(builder.build, LayerMaker), builder.name
    return builder.build


# -- the two sides -----------------------------------------------------------------------------------------------------


class _Chain(nn.Module):
    """Calls layers one after another, and each again in its backward. Layers share their tied parameters."""

    def __init__(self, builders: Sequence[LayerBuilder]) -> None:
        super().__init__()
        announce(builders)
        self.layers = nn.ModuleList(builder.build() for builder in builders)
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = tensor.data.clone()  # as workers share no memory
        self._held = [maker_of(builder).segment.held for builder in builders]
        owners: dict[str, nn.Parameter] = {}
        for layer, held in zip(self.layers, self._held, strict=True):
            for path, first in held.items():
                way, _, name = path.rpartition(".")
                own = layer.get_submodule(way)._parameters
                if (parameter := own.get(name)) is not None:
                    own[name] = owners.setdefault(first, parameter)

    def forward(self, *values: Tensor) -> Tensors:
        for layer in self.layers:
            argument = as_argument(values)
            with set_checkpoint_early_stop(False):  # a layer leaves the contexts that it enters
                returned = checkpoint(layer, argument, use_reentrant=False) if self.training else layer(argument)
            values = tuple(map(canonical, as_tensors(returned)))
        return values

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module."""
        sides = zip(self.layers, self._held, strict=True)
        return {first: attrgetter(path)(layer) for layer, held in sides for path, first in held.items()}


def itself(traced_from: TracedFrom, given: Given) -> _Side:
    """Constructs the module, and returns it as the side to compare with."""
    with quiet(), seeded(traced_from.seed):
        called = Called(traced_from.constructor(), traced_from.call)
    module = called.module

    def tensors() -> dict[str, Tensor]:
        return {**dict(nn.Module.named_parameters(module)), **dict(nn.Module.named_buffers(module))}

    return _Side(called, tensors, traced_from.autocast, given)


class _Side:
    """Runs the layers, or the module itself, on one micro-batch at a time.

    Args:
        module: takes the inputs.
        tensors: returns parameters and buffers by their first name in the module itself.
        autocast: type of the autocast; None: there is none.
        given: loss and optimizer.
    """

    def __init__(
        self, module: nn.Module, tensors: Callable[[], dict[str, Tensor]], autocast: str | None, given: Given
    ) -> None:
        self._module, self.tensors, self._autocast, self._loss = module, tensors, autocast, given.loss
        with torch.no_grad():
            module.train()
        parameters = [(name, tensor) for name, tensor in tensors().items() if isinstance(tensor, nn.Parameter)]
        self.optimizer = given.optimizer(parameters)
        self.has_half = autocast is not None or any(parameter.itemsize == 2 for _, parameter in parameters)

    def call(self, trains: bool, micro_batch: MicroBatch) -> Tensor:
        """Returns the output of one forward. In training it also runs backward, which adds to the gradients."""
        inputs, targets = micro_batch
        alone = patch.object(torch.distributed, "is_initialized", lambda: False)  # of SyncBatchNorm
        with alone, averaged_over_a_mini_batch(self._module), torch.set_grad_enabled(trains):
            if self._module.training is not trains:  # loops set the mode only where it changes, too
                self._module.train(trains)
            with autocast_of(self._autocast)():
                made = self._module(*(tensor.clone() for tensor in inputs))
                outputs: Tensors = made if isinstance(made, tuple) else (made,)
                pairs = self._with_gradients(outputs, targets) if trains else []
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return joined(outputs)

    def _with_gradients(self, outputs: Tensors, targets: Tensors) -> list[tuple[Tensor, Tensor]]:
        """Returns each output on which the loss depends, with its gradient.

        Weights of the loss get no gradient, as the loss is computed apart from the model.
        """
        apart = tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)
        loss = self._loss(apart, targets)
        needed = [number for number, output in enumerate(outputs) if output.requires_grad]
        if not (needed and loss.requires_grad):
            return []
        gradients = torch.autograd.grad(loss, [apart[number] for number in needed], allow_unused=True)
        return [(outputs[number], own) for number, own in zip(needed, gradients, strict=True) if own is not None]


def joined(outputs: Tensors) -> Tensor:
    """Returns a copy of the output; several outputs become one vector of all their numbers."""
    if len(outputs) == 1:
        return outputs[0].detach().clone()
    return torch.cat([output.detach().flatten().to(torch.get_default_dtype()) for output in outputs])


# -- the calls ---------------------------------------------------------------------------------------------------------


class _Calls:
    """Calls both sides, the layers and the module itself, alike, and measures after each call how far they are apart.

    Args:
        builders: make the layers; they know what module they were traced from.
        given: what both sides get from a run.
    """

    def __init__(self, builders: Sequence[LayerBuilder], given: Given) -> None:
        traced_from, chain = maker_of(builders[0]).traced_from, _Chain(builders)
        self._layers = _Side(chain, chain.tensors, traced_from.autocast, given)
        self._itself, self._given = itself(traced_from, given), given
        self._gaps: dict[str, list[tuple[Key, Gap]]] = {}  # by kind and call
        self._number = 0  # of the last call
        self._trained: set[str] = set()  # parameters that have had a gradient

    def run(self) -> Quantity:
        """Runs all calls and updates, and judges what was measured."""
        with quiet(), seeded(0):
            for call in CALLS:
                if call is None:
                    self._update()
                    continue
                try:
                    self._call(*call)
                except Exception as error:
                    if call[1] != FEW or not isinstance(error, SizeError):  # no run has so few examples
                        raise
        return self._judged()

    def differ(self, which: str) -> bool:
        """Returns whether both sides differ, or one fails, with inputs ``which``: `ONE` example, or `SHORT` texts."""
        few, taken = ([tensor.shape for tensor in self._given.call(kind, 0)[0]] for kind in (FEW, which))
        if few == taken:  # no input is a text
            return False
        self._gaps = {}
        with quiet(), seeded(0):
            try:
                self._call(True, which)
                self._call(False, which)
            except Exception:
                return True
        return bool(self._judged().beyond)

    def _call(self, trains: bool, which: str) -> None:
        """Calls both sides with the same inputs and random numbers, and measures all that can be named."""
        self._number += 1
        micro_batch = self._given.call(which, self._number)
        with SameNoise(self._number):
            ours, before = self._layers.call(trains, micro_batch), _generators()
            own = self._itself.call(trains, micro_batch)
            drawn = [name for name, state in _generators().items() if state != before[name]]
        place = f"call {self._number}, {'training' if trains else 'evaluation'}: "
        self._measure(place + OUTPUT, {"": ours}, {"": own})
        self._measure(place + DRAWN, {}, dict.fromkeys(drawn, torch.ones(1)))
        held = [by_kind(side.tensors()) for side in (self._layers, self._itself)]
        for kind in (TRAINED, BUFFER, GRADIENT)[: 2 + trains]:
            self._measure(place + kind, held[0][kind], held[1][kind])
        self._trained |= {name for name, gradient in held[1][GRADIENT].items() if bool(gradient.any())}

    @torch.no_grad()
    def _update(self) -> None:
        """Updates both sides from the same gradients, and changes the trained weights further, see `_perturb`."""
        ours, own = self._layers.tensors(), self._itself.tensors()
        both = ours.keys() & own.keys()
        for name in both:
            if (gradient := ours[name].grad) is not None and (other := own[name].grad) is not None:
                gradient.copy_(other)
        self._layers.optimizer.step()
        self._itself.optimizer.step()
        held = [by_kind(side)[PARAMETER] for side in (ours, own)]
        self._measure(f"update after call {self._number}: {PARAMETER}", *held)
        for name in held[0].keys() & held[1].keys():
            ours[name].grad = own[name].grad = None
            if name in self._trained:
                _perturb(name, own[name])
            if ours[name].shape == own[name].shape:
                ours[name].copy_(own[name])  # so that rounding does not add up

    def _measure(self, kind: str, ours: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Measures tensors of the same name; ``kind`` says what they are, and in which call.

        A buffer may be on one side alone: a layer's constant, or a table made at first use.
        """
        may_lack_one = kind.endswith((TRAINED, BUFFER))
        for name in dict.fromkeys([*own, *ours]):
            if may_lack_one and not (name in own and name in ours):
                continue
            one, other = ours.get(name), own.get(name)
            same_type = one is not None and other is not None and one.dtype == other.dtype
            gap = measure(one, other) if same_type else MISSING
            self._gaps.setdefault(kind, []).append(((NO_LAYER, f"{kind} of {name}" if name else kind), gap))

    def _judged(self) -> Quantity:
        """Judges all that was measured, each tensor together with those of its kind and call."""
        is_half, found = self._layers.has_half, list[Quantity]()
        for kind, gaps in self._gaps.items():
            of_half = GRADIENT_OF_HALF if kind.endswith(GRADIENT) else OF_HALF
            tolerance, small = (of_half, SMALL_OF_HALF) if is_half else (ROUNDING, SMALL_SHARE)
            found.append(judge_tensors(kind, gaps, tolerance, small, kind=lambda _: None))
        worst = max((one.worst for one in found if one.worst), key=lambda difference: difference.relative, default=None)
        beyond = [difference for quantity in found for difference in quantity.beyond]
        return Quantity("all", sum(quantity.compared for quantity in found), worst, beyond)


def _generators() -> dict[str, str]:
    """Returns the states of the default random generators. A traced module may draw from torch's alone."""
    torchs = str(torch.get_rng_state().tolist())  # unchanged unless forward seeds: `SameNoise` restores it
    return {"Python's": str(random.getstate()), "numpy's": str(np.random.get_state()), "torch's, seeded": torchs}


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns what is compared of parameters and buffers: kind -> name -> tensor."""
    parameters: dict[str, Tensor] = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    return {
        PARAMETER: parameters,
        BUFFER: {name: tensor for name, tensor in tensors.items() if name not in parameters},
        TRAINED: {name: torch.tensor(parameter.requires_grad) for name, parameter in parameters.items()},
        GRADIENT: {name: p.grad.to_dense() for name, p in parameters.items() if p.grad is not None},
    }


def _perturb(name: str, parameter: Tensor) -> None:
    """Adds noise to a parameter in place, of about a hundredth of its numbers' root mean square.

    So a copy of old values shows, however small the learning rate is.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = float(parameter.norm()) / math.sqrt(parameter.numel() or 1)
    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01 * (size + 1e-3))


class SameNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Seeds the generator before each operation that draws, by the call, the operation's name and shapes.

    The generator's state is restored after it.
    """

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
    """Makes BatchNorm's running averages follow the statistics of a whole mini-batch (paper, section 2.2).

    All calls in the context are its micro-batches; the averages change once, at the end.
    """
    seen: dict[_BatchNorm, list[Tensor]] = {}  # for each call [3, channels]: count, sums, sums of squares
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
