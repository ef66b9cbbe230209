"""Counts the cost of each layer: the c_i that the partitioner balances (paper, section 2.1), for any list of layers.

Costs that are measured on a device come from `model_profile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like
from ..typed_section import SecondsOrZero
from .fake_layers import CostError, TensorShape
from .survey import Survey, survey


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

    @classmethod
    def of_cost(cls, cost: float) -> LayerTimes:
        """Returns times in the unit of a cost that counts a forward; a backward takes two of them."""
        return cls(cost, cost, recompute=cost, backward=2 * cost, input_gradient=cost, weight_gradient=cost)

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
class ForwardFacts:
    """Describes the forward of one layer.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention (a multiply-add counts two).
        elements: floating-point numbers that it puts out.
        outputs: what the next layer gets.
    """

    flops: int
    elements: int
    outputs: tuple[TensorShape, ...]

    @property
    def cost(self) -> float:
        """Returns its FLOPs and one for each number put out: elementwise work counts a little, no cost is zero."""
        return float(self.flops + max(1, self.elements))


class _OneModule(ModuleTracker):
    """Counts for the whole layer alone: torch's hooks on its parts fail where a forward calls `autograd.grad`."""

    def __enter__(self) -> _OneModule:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def count_forward(module: nn.Module, inputs: Tensors, *, is_last: bool) -> ForwardFacts:
    """Counts the FLOPs of a layer's forward, for `survey`."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _OneModule()
    plain_attention = sdpa_kernel(SDPBackend.MATH)  # matrix products, which every release of torch counts
    with torch.no_grad(), plain_attention, counter:
        outputs = as_tensors(module(as_argument(inputs)))
    elements = sum(tensor.numel() for tensor in outputs if tensor.is_floating_point())
    return ForwardFacts(counter.get_total_flops(), elements, grouped_like(map(TensorShape.of, outputs), outputs))


def layer_costs(builders: Sequence[LayerBuilder], found: Survey[ForwardFacts], how: str) -> list[float]:
    """Returns the cost of every layer.

    Args:
        builders: the model.
        found: what a survey by `count_forward` has found.
        how: ``flops``: a forward's (`ForwardFacts.cost`), or a builder's ``cost``, where it has one.
            ``parameters``: their number. ``declared``: each builder's ``cost``.

    Raises:
        CostError: a layer's cost cannot be found in this way; it names the layer and the way out.
    """
    if how == "profile":
        raise CostError("pipeline.cost=profile cannot be counted: use flops, parameters or declared")
    if how == "parameters":
        return [float(sum(one.form.numel for one in layer)) for layer in found.parameters]
    costs = []
    for index, builder in enumerate(builders):
        if builder.cost is not None:
            costs.append(float(builder.cost))
        elif how == "declared":
            said = f"pipeline.cost=declared but layer {builder.name!r} has no cost"
            raise CostError(f"{said}: give every layer a `cost`, or use pipeline.cost=flops")
        elif found.failure is not None and index >= len(found.layers):
            raise found.failure
        else:
            costs.append(found.layers[index].cost)
    return costs


def forward_flops(builders: Sequence[LayerBuilder], inputs: Tensors) -> float:
    """Returns the cost of a forward of the whole model by FLOPs.

    Raises:
        CostError: a layer cannot be counted.
    """
    return sum(layer_costs(builders, survey(builders, inputs, count_forward), "flops"))
