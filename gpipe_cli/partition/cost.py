"""Counts what each layer costs: the c_i that the partitioner balances (paper, section 2.1), for any list of layers.

Layers whose builders are equal ``functools.partial`` objects and whose inputs have equal shapes are counted once.
Costs that are measured on a device come from `profile.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.grouping import as_argument, as_tensors, grouped_like, grouping_of
from .fake_layers import CostError, TensorShape, build_key, build_without_memory, explaining_failures, fake_mode


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
    """

    name: str
    parameters: int
    flops: int | None
    outputs: tuple[TensorShape, ...] | None
    cost: float


def layer_costs(builders: Sequence[LayerBuilder], example_inputs: Tensors, how: str) -> list[LayerCost]:
    """Returns the cost of every layer.

    Args:
        builders: the model.
        example_inputs: of the first layer, for one micro-batch; fake and meta tensors will do.
        how: ``flops``: the forward's FLOPs on fake tensors, plus one for each floating-point number that the layer puts
            out, so that elementwise work counts a little and no cost is zero; a builder's ``cost``, where it has one,
            stands for that sum. ``parameters``: their number. ``declared``: each builder's ``cost``.

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
    with torch.random.fork_rng(devices=[]):
        for index, builder in enumerate(builders):
            key = build_key(builder, index)
            if key not in known:
                known[key] = number_of_parameters(build_without_memory(builder, fake_mode()))
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
    # The last layers need not run if they all declare their cost: the way out for layers that fake tensors cannot pass.
    counted = 1 + max((index for index, builder in enumerate(builders) if builder.cost is None), default=-1)
    shapes = tuple(TensorShape.of(tensor) for tensor in example_inputs)
    known: dict[Hashable, LayerCost] = {}
    costs = []
    with torch.random.fork_rng(devices=[]):
        for index, builder in enumerate(builders[:counted]):
            key = (build_key(builder, index), shapes, grouping_of(shapes))
            if key not in known:
                known[key] = _measure_without_memory(builder, shapes)
            cost = known[key].cost if builder.cost is None else float(builder.cost)
            costs.append(replace(known[key], name=builder.name, cost=cost))
            shapes = known[key].outputs or ()
    return costs + layer_costs(builders[counted:], (), "declared")


def _measure_without_memory(builder: LayerBuilder, shapes: tuple[TensorShape, ...]) -> LayerCost:
    fake = fake_mode()
    module = build_without_memory(builder, fake)
    counter = FlopCounterMode(display=False)
    plain_attention = sdpa_kernel(SDPBackend.MATH)  # matrix products, which every release of torch counts
    with explaining_failures(builder, shapes), fake, torch.no_grad(), plain_attention, counter:
        outputs = as_tensors(module(as_argument(grouped_like((shape.empty() for shape in shapes), shapes))))
    elements = sum(tensor.numel() for tensor in outputs if tensor.is_floating_point())
    flops = counter.get_total_flops()
    made = grouped_like(map(TensorShape.of, outputs), outputs)
    return LayerCost(builder.name, number_of_parameters(module), flops, made, float(flops + max(1, elements)))


def number_of_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
