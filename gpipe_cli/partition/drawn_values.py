"""Runs layers whose operations depend on the values of their inputs on several draws of random values.

Such layers cannot run on fake tensors. Where the draws give outputs of different shapes, no cut may lie behind the
layer, and the layers after it run on what it has returned, until a boundary has one shape again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like, grouping_of
from .fake_layers import (
    CostError,
    TensorShape,
    TooFewExamples,
    build_or_explain,
    build_without_memory,
    explaining_failures,
    fake_mode,
)

DRAWS = 5  # so that shapes that depend on values differ between two of them, or are hardly likely to

Drawn: TypeAlias = "list[Tensors]"
"""Inputs or outputs of a layer, one for each draw."""

T = TypeVar("T")


def measured_on_shapes(
    builder: LayerBuilder,
    shapes: tuple[TensorShape, ...],
    drawn: Drawn | None,
    measure: Callable[[nn.Module, Tensors], T],
) -> tuple[T, bool, Drawn | None]:
    """Measures a layer on fake tensors or, where it cannot run on them, on drawn values.

    Args:
        shapes: of its inputs.
        drawn: inputs of each draw, where their shapes depend on values.
        measure: called with the layer and its inputs.

    Returns:
        What ``measure`` returns, whether that is for drawn values, and the outputs of each draw where their shapes
        depend on values.

    Raises:
        CostError: the layer fails on drawn values too; it names the layer.
    """
    if drawn is None:
        fake = fake_mode()
        module = build_without_memory(builder, fake)
        try:
            with explaining_failures(builder, shapes), fake:
                return measure(module, grouped_like((shape.empty() for shape in shapes), shapes)), False, None
        except TooFewExamples:
            raise
        except CostError:  # it looks at values, or fails on real tensors too
            drawn = draw(shapes)
    torch.manual_seed(0)  # every start of a run cuts alike
    module = build_or_explain(builder)
    with explaining_failures(builder, [TensorShape.of(tensor) for tensor in drawn[0]]):
        found = measure(module, drawn[0])
        outputs = run_on(module, drawn)
    return found, True, None if have_one_shape(outputs) else outputs


def draw(shapes: Sequence[TensorShape]) -> Drawn:
    """Returns inputs of these shapes: normal numbers, and zeros and ones for integers, which are valid as any index."""
    generator = torch.Generator().manual_seed(0)

    def values(shape: TensorShape) -> Tensor:
        if shape.dtype.is_floating_point or shape.dtype.is_complex:
            drawn = torch.randn(shape.shape, generator=generator)
        else:
            drawn = torch.randint(0, 2, shape.shape, generator=generator)
        return shape.empty().copy_(drawn)

    return [grouped_like(map(values, shapes), shapes) for _ in range(DRAWS)]


def run_on(module: Callable[[Any], Any], drawn: Drawn) -> Drawn:
    """Returns the outputs of a layer for each draw of its inputs."""
    with torch.no_grad():
        return [as_tensors(module(as_argument(inputs))) for inputs in drawn]


def have_one_shape(drawn: Drawn) -> bool:
    """Returns whether the tensors of all draws have the same shapes and grouping."""
    return len({(grouping_of(tensors), *(tensor.shape for tensor in tensors)) for tensors in drawn}) == 1
