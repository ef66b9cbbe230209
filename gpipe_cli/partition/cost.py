"""Counts the cost of each layer: the c_i that the partitioner balances (paper, section 2.1), for any list of layers.

Layers whose builders are equal ``functools.partial`` objects and whose inputs have equal shapes are counted once.
Costs that are measured on a device come from `model_profile.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like, grouping_of
from ..pipeline.randomness import COSTS, seeded
from ..typed_section import SecondsOrZero
from .fake_layers import CostError, Drawn, TensorShape, build_key, build_without_memory, fake_mode, measured_on_shapes


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of one layer, or of several together, for one micro-batch.

    Attributes:
        inference: forward without a graph.
        forward: forward with a graph.
        recompute: forward with a graph for the second time, in which BatchNorm gathers nothing.
        backward: as a whole.
        input_gradient, weight_gradient: its halves (`pipeline/halves.py`); together they take longer than the whole.
    """

    inference: SecondsOrZero
    forward: SecondsOrZero
    recompute: SecondsOrZero
    backward: SecondsOrZero
    input_gradient: SecondsOrZero
    weight_gradient: SecondsOrZero

    @property
    def total(self) -> float:
        """Returns the seconds of a forward with a graph and its backward."""
        return self.forward + self.backward

    def slower(self, factor: float) -> LayerTimes:
        """Returns all times multiplied by ``factor``."""
        return LayerTimes(*(getattr(self, phase.name) * factor for phase in fields(LayerTimes)))


def total_times(times: Sequence[LayerTimes]) -> LayerTimes:
    """Returns the times of layers that run one after the other."""
    return LayerTimes(*(sum(getattr(each, phase.name) for each in times) for phase in fields(LayerTimes)))


def cell_total(layers: Sequence[LayerTimes], loss: Sequence[LayerTimes]) -> LayerTimes:
    """Returns the times of a cell: of its layers and, in the last cell, the loss, which inference does not need."""
    return replace(total_times([*layers, *loss]), inference=total_times(layers).inference)


@dataclass(frozen=True)
class LayerCost:
    """Describes one layer.

    Attributes:
        name: the builder's.
        parameters: their number.
        flops: of the forward's matrix products, convolutions and attention, for the example inputs (a multiply-add
            counts two); None where the layer was not run on fake tensors.
        outputs: shapes of the layer's outputs; None where it was not run.
        cost: c_i, for the partitioner.
        may_end_cell: False where the shapes of its outputs depend on values, so that no message could carry them.
        measured: the seconds of each pass, of which ``cost`` is the sum; None where none were measured.
    """

    name: str
    parameters: int
    flops: int | None
    outputs: tuple[TensorShape, ...] | None
    cost: float
    may_end_cell: bool = True
    measured: LayerTimes | None = None

    @classmethod
    def timed(cls, name: str, parameters: int, times: LayerTimes) -> LayerCost:
        """Returns the description of a layer whose cost is its seconds."""
        return cls(name, parameters, None, None, times.total, measured=times)

    @property
    def times(self) -> LayerTimes:
        """Returns the time of each pass, in the unit of the cost; unmeasured, a backward takes two forwards."""
        c = self.cost
        return self.measured or LayerTimes(c, c, recompute=c, backward=2 * c, input_gradient=c, weight_gradient=c)


def layer_costs(builders: Sequence[LayerBuilder], example_inputs: Tensors, how: str) -> list[LayerCost]:
    """Returns the cost of every layer.

    Args:
        builders: the model.
        example_inputs: of the first layer, for one micro-batch; fake and meta tensors will do.
        how: ``flops``: the forward's FLOPs on fake tensors, plus one for each floating-point number that the layer puts
            out, so that elementwise work counts a little and no cost is zero; a builder's ``cost``, where it has one,
            stands for that sum. A layer that does not run on fake tensors is counted on random values.
            ``parameters``: their number. ``declared``: each builder's ``cost``.

    Raises:
        CostError: a layer's cost cannot be found in this way; it names the layer and the way out.
    """
    if how == "flops":
        return _count_flops(builders, example_inputs)
    if how not in ("parameters", "declared"):
        raise CostError(f"pipeline.cost={how} cannot be counted: use flops, parameters or declared")
    return [
        LayerCost(builder.name, number, None, None, float(number) if how == "parameters" else _declared(builder))
        for builder, number in zip(builders, count_parameters(builders), strict=True)
    ]


def count_parameters(builders: Sequence[LayerBuilder]) -> list[int]:
    """Returns the number of parameters of each layer, counted without allocating them.

    Raises:
        CostError: a layer cannot be built.
    """
    known: dict[Hashable, int] = {}
    numbers = []
    with seeded(COSTS):
        for index, builder in enumerate(builders):
            key = build_key(builder, index)
            if key not in known:
                known[key] = number_of_parameters(build_without_memory(builder, fake_mode()))
            numbers.append(known[key])
    return numbers


def _declared(builder: LayerBuilder) -> float:
    if builder.cost is None:
        said = f"pipeline.cost=declared but layer {builder.name!r} has no cost"
        raise CostError(f"{said}: give every layer a `cost`, or use pipeline.cost=flops")
    return float(builder.cost)


def _count_flops(builders: Sequence[LayerBuilder], example_inputs: Tensors) -> list[LayerCost]:
    # The last layers need not run if they all declare their cost: the way out for layers that fake tensors cannot pass.
    counted = 1 + max((index for index, builder in enumerate(builders) if builder.cost is None), default=-1)
    shapes = tuple(TensorShape.of(tensor) for tensor in example_inputs)
    drawn: Drawn | None = None
    known: dict[Hashable, tuple[LayerCost, Drawn | None]] = {}
    costs = []
    with seeded(COSTS):
        for index, builder in enumerate(builders[:counted]):
            key = (build_key(builder, index), shapes, grouping_of(shapes)) if drawn is None else index
            if key not in known:
                known[key] = _count(builder, shapes, drawn)
            found, drawn = known[key]
            cost = found.cost if builder.cost is None else float(builder.cost)
            costs.append(replace(found, name=builder.name, cost=cost))
            shapes = found.outputs or ()
    return costs + layer_costs(builders[counted:], (), "declared")


def _count(
    builder: LayerBuilder, shapes: tuple[TensorShape, ...], drawn: Drawn | None
) -> tuple[LayerCost, Drawn | None]:
    """Returns the cost, and the outputs of each draw where their shapes depend on values; ``drawn``: its inputs."""
    counted, outputs = measured_on_shapes(builder, shapes, drawn, partial(_run, builder))
    return replace(counted, may_end_cell=outputs is None), outputs


class _OneModule(ModuleTracker):
    """Counts for the whole layer alone: torch's hooks on its parts fail where a forward calls `autograd.grad`."""

    def __enter__(self) -> _OneModule:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _run(builder: LayerBuilder, module: nn.Module, inputs: Tensors) -> LayerCost:
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _OneModule()
    plain_attention = sdpa_kernel(SDPBackend.MATH)  # matrix products, which every release of torch counts
    with torch.no_grad(), plain_attention, counter:
        outputs = as_tensors(module(as_argument(inputs)))
    elements = sum(tensor.numel() for tensor in outputs if tensor.is_floating_point())
    flops = counter.get_total_flops()
    made = grouped_like(map(TensorShape.of, outputs), outputs)
    return LayerCost(builder.name, number_of_parameters(module), flops, made, float(flops + max(1, elements)))


def keep_shapes_that_depend_on_values_together(
    costs: Sequence[LayerCost], builders: Sequence[LayerBuilder], example_inputs: Tensors
) -> list[LayerCost]:
    """Returns costs that were found without running the layers on draws, with `LayerCost.may_end_cell` of each.

    Nothing is known about layers that cannot be counted by FLOPs.
    """
    try:
        counted = _count_flops(builders, example_inputs)
    except CostError:
        return list(costs)
    return [replace(cost, may_end_cell=other.may_end_cell) for cost, other in zip(costs, counted, strict=True)]


def number_of_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
