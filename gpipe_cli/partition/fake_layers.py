"""Builds layers on fake tensors, which have shapes and no memory, and recognises layers that are built alike.

An 84-billion-parameter list is counted on a laptop. A layer that cannot be built on fake tensors, because its
constructor looks at values, is built for real, alone, and freed. One whose forward looks at values runs on several
draws of random values. Where they give outputs of different shapes, no cut may lie behind the layer, and the layers
after it run on what it has returned, until a boundary has one shape again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..micro_batch import Tensors
from ..pipeline.messages.boundary import as_argument, as_tensors, grouped_like, grouping_of

DRAWS = 5  # so that shapes that depend on values differ between two of them, or are hardly likely to

Drawn: TypeAlias = "list[Tensors]"
"""Inputs or outputs of a layer, one for each draw."""

T = TypeVar("T")


class CostError(ConfigurationError):
    """Raised when a layer's cost cannot be found in the way asked for."""


@dataclass(frozen=True)
class TensorShape:
    """Describes a tensor without its values.

    Attributes:
        requires_grad: True for a parameter that learns, and for a tensor between two layers that takes a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """Describes a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> Tensor:
        """Returns a new tensor of this shape; its values are undefined."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, requires_grad=self.requires_grad)

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def fake_mode() -> FakeTensorMode:
    """Returns the context in which new tensors have shapes and no memory."""
    # Real tensors may occur: those of a module that a builder's closure holds.
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_without_memory(builder: LayerBuilder, fake: FakeTensorMode) -> nn.Module:
    """Builds the layer with fake weights or, if its constructor looks at values, with real ones.

    Raises:
        CostError: it cannot be built.
    """
    try:
        with fake:
            module = builder.made()
    except Exception:
        return build_or_explain(builder)
    refuse_parameters(builder.name, module)
    return module


def build_or_explain(builder: LayerBuilder) -> nn.Module:
    """Builds the layer with real weights.

    Raises:
        CostError: it cannot be built; names the layer and the cause.
    """
    try:
        module = builder.made()
    except Exception as error:
        raise CostError(
            f"layer {builder.name!r} cannot be built: {type(error).__name__}: {error}; call its builder by hand"
        ) from error
    refuse_parameters(builder.name, module)
    return module


def refuse_parameters(layer: str, module: nn.Module) -> None:
    """Refuses parameters without a shape and complex ones.

    Raises:
        CostError: it names the layer, the parameter and what to use instead.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            said = "gets its shape only from the first input: give the sizes, as nn.Linear(in_features, out_features)"
        elif parameter.is_complex():
            said = f"is complex ({str(parameter.dtype).removeprefix('torch.')}): keep a real one with a last dimension "
            said += "of 2, and use torch.view_as_complex(parameter) in forward"
        else:
            continue
        raise CostError(f"layer {layer!r}: parameter {name!r} {said}")


@contextmanager
def explaining_failures(builder: LayerBuilder, shapes: Sequence[TensorShape]) -> Iterator[None]:
    """Turns an exception into a CostError that names the layer, its inputs and the way out."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error  # a cell's error names the layer, and has the layer's own as cause
        raise CostError(
            f"layer {builder.name!r}, given {', '.join(map(str, shapes))}, fails while its cost is measured: "
            f"{type(cause).__name__}: {cause}; if it runs in training, gpipe-train takes pipeline.cost=parameters"
        ) from error


def build_key(builder: LayerBuilder, index: int) -> Hashable:
    """Returns a key that is equal for layers that are built alike.

    Alike are the same class, or partials of one function with equal arguments. Any other builder gets ``index``, a key
    of its own.
    """
    build = builder.build
    if not isinstance(build, (partial, type)):
        return index
    key = (build.func, build.args, frozenset(build.keywords.items())) if isinstance(build, partial) else build
    try:
        hash(key)
    except TypeError:
        return index
    return key, builder.frozen


def measured_on_shapes(
    builder: LayerBuilder,
    shapes: Sequence[TensorShape],
    drawn: Drawn | None,
    measure: Callable[[nn.Module, Tensors], T],
) -> tuple[T, Drawn | None]:
    """Measures a layer on fake tensors or, where it cannot run on them, on drawn values.

    Args:
        shapes: shapes of its inputs.
        drawn: inputs of each draw, if their shapes depend on values; None: they do not.
        measure: called with the layer and its inputs.

    Returns:
        What ``measure`` returns; and the outputs of each draw if their shapes depend on values, else None.

    Raises:
        CostError: the layer fails on drawn values too; it names the layer.
    """
    if drawn is None:
        fake = fake_mode()
        module = build_without_memory(builder, fake)
        try:
            with explaining_failures(builder, shapes), fake:
                copy = _for_a_trial(module, shares_weights=True)
                return measure(copy, grouped_like((shape.empty() for shape in shapes), shapes)), None
        except CostError:  # it looks at values, or fails on real tensors too
            drawn = draw(shapes)
    torch.default_generator.manual_seed(0)  # every start of a run cuts alike
    module = build_or_explain(builder)
    with explaining_failures(builder, [TensorShape.of(tensor) for tensor in drawn[0]]):
        module = _for_a_trial(module)
        both = zip(shapes, drawn[0], strict=True)
        typed = (values.detach().to(shape.dtype).requires_grad_(shape.requires_grad) for shape, values in both)
        found = measure(module, grouped_like(typed, shapes))
        with torch.no_grad():
            outputs = [as_tensors(module(as_argument(inputs))) for inputs in drawn]
    forms = {(grouping_of(tensors), *(tensor.shape for tensor in tensors)) for tensors in outputs}
    return found, None if len(forms) == 1 else outputs


def _for_a_trial(module: nn.Module, shares_weights: bool = False) -> nn.Module:
    """Returns a copy of a real module, and a fake module itself.

    A builder may keep the real module that it has built, and a trial changes the state of its module.

    Args:
        shares_weights: the copy has the module's own parameters. For trials on fake tensors, which change none.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return module
    return deepcopy(module, {id(weight): weight for weight in module.parameters()} if shares_weights else None)


def draw(shapes: Sequence[TensorShape]) -> Drawn:
    """Returns `DRAWS` random inputs of these shapes.

    Floating-point ones are normal numbers. Integers are zeros and ones, which are valid indices of nearly any table.
    """
    generator = torch.Generator().manual_seed(0)

    def values(shape: TensorShape) -> Tensor:
        if shape.dtype.is_floating_point or shape.dtype.is_complex:
            drawn = torch.randn(shape.shape, generator=generator)
        else:
            drawn = torch.randint(0, 2, shape.shape, generator=generator)
        return shape.empty().detach().copy_(drawn)

    return [grouped_like(map(values, shapes), shapes) for _ in range(DRAWS)]
