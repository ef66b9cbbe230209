"""Counts the cost of each layer: the c_i that the partitioner balances (paper, section 2.1), for any list of layers.

Costs that are measured on a device come from `model_profile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.messages.boundary import as_argument, as_tensors, grouped_like
from ..typed_section import SecondsOrZero
from .fake_layers import CostError, TensorShape
from .survey import ForwardFacts, Survey
from .tracking import Tracker


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of one layer, or of several together, for one micro-batch.

    Attributes:
        inference: forward without a graph.
        forward: forward with a graph.
        recompute: forward with a graph for the second time, in which BatchNorm gathers nothing.
        backward: the whole backward.
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


def total_times(layers: Sequence[LayerTimes]) -> LayerTimes:
    """Returns the seconds of several layers together."""
    return LayerTimes(*(sum(getattr(each, phase.name) for each in layers) for phase in fields(LayerTimes)))


def with_loss(layers: Sequence[LayerTimes], loss: LayerTimes | None) -> list[LayerTimes]:
    """Returns the seconds of each layer; the last one's include those of the loss, which inference does not need."""
    *others, last = layers
    return [*others, last if loss is None else replace(total_times([last, loss]), inference=last.inference)]


def count_forward(module: nn.Module, inputs: Tensors, *, is_last: bool) -> ForwardFacts:
    """Counts the FLOPs of a layer's forward, for `survey`."""
    plain_attention = sdpa_kernel(SDPBackend.MATH)  # matrix products, which every release of torch counts
    with torch.no_grad(), plain_attention, Tracker() as tracker:
        outputs = as_tensors(module(as_argument(inputs)))
    flops = sum(operation.flops for operation in tracker.operations)
    return ForwardFacts(flops, grouped_like(map(TensorShape.of, outputs), outputs))


def layer_costs(builders: Sequence[LayerBuilder], found: Survey[Any], how: str) -> list[float]:
    """Returns the cost of every layer.

    Args:
        builders: the model.
        found: survey of the model.
        how: ``flops``: a forward's (`ForwardFacts.cost`), or a builder's ``cost``, where it has one.
            ``parameters``: their number. ``declared``: each builder's ``cost``.

    Raises:
        CostError: a layer's cost cannot be found in this way; it names the layer and the way out.
    """
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
