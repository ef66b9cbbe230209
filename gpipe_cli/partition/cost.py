"""What each layer costs: the c_i that the partitioner balances (paper, section 2.1), for any list of layers.

FLOPs and parameters are counted on fake tensors, which have shapes and no memory: an 84-billion-parameter list is
counted on a laptop. Layers whose builders are equal ``functools.partial`` objects and whose inputs have equal shapes
are measured once. A layer that cannot be built on fake tensors, because its constructor looks at values, is built for
real, alone, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.boundary import as_argument, as_tensors
from .layer_times import Autocast, LayerTimes, LayerTrial, Trials

COSTS = ("flops", "parameters", "declared", "profile")
_LOSS = "loss"  # among the keys of layers


class CostError(ValueError):
    """A layer whose cost cannot be found in the way asked for."""


class TooFewExamples(CostError):
    """A micro-batch so small that BatchNorm has a single value of a channel, whose variance is none."""

    def with_way_out(self, M: int) -> str:
        """What to tell the person who chose M micro-batches."""
        return (
            f"pipeline.M={M} leaves too few examples in a micro-batch for BatchNorm, which needs two values of every "
            f"channel: use a smaller pipeline.M or a larger data.batch_size ({self})"
        )


@dataclass(frozen=True)
class TensorShape:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of a tensor of this shape without gaps."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class LayerCost:
    """What is known of one layer.

    Attributes:
        name: the builder's.
        parameters: numbers that the layer learns.
        flops: of the forward's matrix products, convolutions and attention, for the example inputs (a multiply-add is
            two); None where nothing was run on fake tensors.
        outputs: shapes of the layer's outputs; None where nothing was run.
        cost: c_i, for the partitioner.
    """

    name: str
    parameters: int
    flops: int | None
    outputs: tuple[TensorShape, ...] | None
    cost: float


def layer_costs(
    builders: Sequence[LayerBuilder],
    example_inputs: Tensors,
    how: str,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
) -> list[LayerCost]:
    """The cost of every layer.

    Args:
        builders: the model.
        example_inputs: of the first layer, for one micro-batch; only ``profile`` needs real ones, for the others fake
            and meta tensors do.
        how: ``flops``: the forward's FLOPs on fake tensors, plus one for each floating-point number that the layer puts
            out, so that elementwise work counts a little and no cost is zero; a builder's ``cost``, where it has one,
            stands for that sum. ``parameters``: their number. ``declared``: each builder's ``cost``. ``profile``:
            seconds of forward and backward on ``device``, the median of some repeats.
        device: where ``profile`` runs.
        autocast: makes the context in which its forward runs.

    Raises:
        CostError: an unknown ``how``, or a layer that cannot be measured so; it names the layer and the way out.
    """
    if how == "flops":
        return _count_flops(builders, example_inputs)
    if how == "profile":
        return profile_layers(builders, example_inputs, torch.device(device), autocast).layers
    if how not in COSTS:
        raise CostError(f"pipeline.cost={how}: use {', '.join(COSTS)}")
    numbers = count_parameters(builders)
    if how == "parameters":
        return [LayerCost(b.name, n, None, None, float(n)) for b, n in zip(builders, numbers, strict=True)]
    return [
        LayerCost(builder.name, number, None, None, _declared(builder))
        for builder, number in zip(builders, numbers, strict=True)
    ]


def count_parameters(builders: Sequence[LayerBuilder]) -> list[int]:
    """The number of parameters of each layer, counted without allocating them.

    Raises:
        CostError: a layer that cannot be built.
    """
    known: dict[Hashable, int] = {}
    numbers = []
    with torch.random.fork_rng(devices=[]):
        for index, builder in enumerate(builders):
            key = build_key(builder, index)
            if key not in known:
                known[key] = _number_of_parameters(build_without_memory(builder, fake_mode()))
            numbers.append(known[key])
    return numbers


def _declared(builder: LayerBuilder) -> float:
    if builder.cost is None:
        raise CostError(
            f"pipeline.cost=declared but layer {builder.name!r} has no cost: give every layer a `cost`, or use "
            "pipeline.cost=flops"
        )
    return float(builder.cost)


def _count_flops(builders: Sequence[LayerBuilder], example_inputs: Tensors) -> list[LayerCost]:
    # A tail of layers that all declare their cost need not run: the way out where fake tensors cannot pass.
    counted = 1 + max((index for index, builder in enumerate(builders) if builder.cost is None), default=-1)
    shapes = tuple(TensorShape.of(tensor) for tensor in example_inputs)
    known: dict[Hashable, LayerCost] = {}
    costs = []
    with torch.random.fork_rng(devices=[]):
        for index, builder in enumerate(builders[:counted]):
            key = (build_key(builder, index), shapes)
            if key not in known:
                known[key] = _measure_without_memory(builder, shapes)
            cost = known[key].cost if builder.cost is None else float(builder.cost)
            costs.append(replace(known[key], name=builder.name, cost=cost))
            shapes = known[key].outputs or ()
    numbers = count_parameters(builders[counted:])
    return costs + [
        LayerCost(builder.name, number, None, None, _declared(builder))
        for builder, number in zip(builders[counted:], numbers, strict=True)
    ]


def _measure_without_memory(builder: LayerBuilder, shapes: tuple[TensorShape, ...]) -> LayerCost:
    fake = fake_mode()
    module = build_without_memory(builder, fake)
    # The plain form of attention is made of matrix products, which the counter knows in every release of torch.
    plain_attention = sdpa_kernel(SDPBackend.MATH)
    with _named(builder, shapes), fake, torch.no_grad(), plain_attention, FlopCounterMode(display=False) as counter:
        outputs = as_tensors(module(as_argument([shape.empty() for shape in shapes])))
    elements = sum(tensor.numel() for tensor in outputs if tensor.is_floating_point())
    flops = counter.get_total_flops()
    made = tuple(TensorShape.of(tensor) for tensor in outputs)
    return LayerCost(builder.name, _number_of_parameters(module), flops, made, float(flops + max(1, elements)))


@dataclass(frozen=True)
class Profile:
    """What was timed of a model.

    Attributes:
        layers: their costs are seconds.
        times: of each layer. loss: of the task's loss behind the last, where it was asked for.
    """

    layers: list[LayerCost]
    times: list[LayerTimes]
    loss: LayerTimes | None

    @property
    def costs(self) -> list[LayerCost]:
        """For the partitioner: the last layer pays for the loss, which is never cut off from it."""
        loss = 0.0 if self.loss is None else self.loss.total
        return [*self.layers[:-1], replace(self.layers[-1], cost=self.layers[-1].cost + loss)]


def profile_layers(
    builders: Sequence[LayerBuilder],
    example_inputs: Tensors,
    device: torch.device,
    autocast: Autocast = nullcontext,
    loss: Callable[[Tensors], Tensor] | None = None,
    targets: Tensors | None = None,
) -> Profile:
    """Runs the layers, of equal ones one, and times forward and backward: the median of some repeats.

    Args:
        builders: the model.
        example_inputs: of the first layer, for one micro-batch: real tensors.
        device: where it runs.
        autocast: makes the context in which forward runs.
        loss: of the last layer's outputs; None: it is not timed.
        targets: of the micro-batch, for layers with an ``auxiliary_loss``; None: those are not timed.

    Raises:
        CostError: a layer that fails, or the loss; it says which, and for a layer the way out.
    """
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in example_inputs):
        raise CostError("pipeline.cost=profile runs the layers and needs real inputs: use pipeline.cost=flops")
    known: dict[Hashable, tuple[LayerCost, Tensors]] = {}
    keys: list[Hashable] = []
    trials = Trials(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        values = tuple(tensor.to(device) for tensor in example_inputs)
        for index, builder in enumerate(builders):
            shapes = tuple(TensorShape.of(tensor) for tensor in values)
            keys.append((build_key(builder, index), shapes, tuple(tensor.requires_grad for tensor in values)))
            if keys[-1] not in known:
                module = _build(builder).to(device)
                trial = LayerTrial.of(module, values, device, autocast, targets)
                with _named(builder, shapes):
                    outputs = trial.outputs()
                made = tuple(TensorShape.of(tensor) for tensor in outputs)
                known[keys[-1]] = LayerCost(builder.name, _number_of_parameters(module), None, made, 0.0), outputs
                trials.add(keys[-1], trial, sum(t.numel() * t.element_size() for t in (*module.parameters(), *outputs)))
            values = known[keys[-1]][1]
        if loss is not None:
            trials.add(_LOSS, _trial_of_loss(loss, values, device, autocast), 0)
        trials.run()
    times = [trials.times[key] for key in keys]
    layers = [
        replace(known[key][0], name=builder.name, cost=time.total)
        for key, builder, time in zip(keys, builders, times, strict=True)
    ]
    return Profile(layers, times, trials.times.get(_LOSS))


def _trial_of_loss(
    loss: Callable[[Tensors], Tensor], outputs: Tensors, device: torch.device, autocast: Autocast
) -> LayerTrial:
    trial = LayerTrial(lambda values: ((loss(values),), ()), outputs, device, autocast)
    try:
        trial.outputs()
    except Exception as error:
        raise CostError(f"the task's loss fails while it is timed: {type(error).__name__}: {error}") from error
    return trial


def _number_of_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fake_mode() -> FakeTensorMode:
    """In which tensors have shapes and no memory."""
    # Real tensors may come in: those of a module that stands ready in a builder's closure.
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_without_memory(builder: LayerBuilder, fake: FakeTensorMode) -> nn.Module:
    """The layer with fake weights; with real ones if its constructor looks at values.

    Raises:
        CostError: it cannot be built.
    """
    try:
        with fake:
            return builder.build()
    except Exception:
        return _build(builder)


def _build(builder: LayerBuilder) -> nn.Module:
    try:
        return builder.build()
    except Exception as error:
        raise CostError(
            f"layer {builder.name!r} cannot be built: {type(error).__name__}: {error}; call its builder by hand"
        ) from error


@contextmanager
def _named(builder: LayerBuilder, shapes: Sequence[TensorShape]) -> Iterator[None]:
    """Says which layer failed on which inputs."""
    given = f"layer {builder.name!r}, given {', '.join(map(str, shapes))}"
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CostError(
            f"{given}: its operations depend on the values of its inputs ({error}), which FLOPs cannot be counted "
            "without; give it and all layers after it a `cost`, or use pipeline.cost=parameters"
        ) from error
    except Exception as error:
        refuse_too_few_examples(error, given)
        raise CostError(
            f"{given}, fails while its cost is measured: {type(error).__name__}: {error}; if it runs in training, use "
            "pipeline.cost=parameters"
        ) from error


def refuse_too_few_examples(error: Exception, given: str) -> None:
    """Gives torch's complaint about BatchNorm a name of its own; other errors are the caller's.

    Args:
        given: which layer, and what it was given.

    Raises:
        TooFewExamples: that is what it was.
    """
    if "Expected more than 1 value per channel" in str(error):
        raise TooFewExamples(given) from error


def build_key(builder: LayerBuilder, index: int) -> Hashable:
    """Equal for layers that are built alike: classes and partials with equal arguments; else the layer's own number."""
    if not isinstance(builder.build, (partial, type)):
        return index
    key = _frozen(builder.build)
    try:
        hash(key)
    except TypeError:
        return index
    return key


def _frozen(value: object) -> Hashable:
    """The value, with partials, lists and dicts as tuples; with its type, because 1, 1.0 and True are equal."""
    if isinstance(value, partial):
        return (partial, _frozen(value.func), _frozen(value.args), _frozen(value.keywords))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, Mapping):
        return (type(value), frozenset((key, _frozen(item)) for key, item in value.items()))
    return (type(value), value)
