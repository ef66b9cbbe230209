"""Builds layers on fake tensors, which have shapes and no memory, and recognises layers that are built alike.

An 84-billion-parameter list is counted on a laptop. A layer that cannot be built on fake tensors, because its
constructor looks at values, is built for real, alone, and freed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from ..layers import LayerBuilder


class CostError(ValueError):
    """Raised when a layer's cost cannot be found in the way asked for."""


class TooFewExamples(CostError):
    """Raised when a micro-batch is so small that BatchNorm has a single value of a channel, which has no variance."""

    def with_way_out(self, M: int) -> str:
        """Returns the message for a run with M micro-batches."""
        return (
            f"pipeline.M={M} leaves too few examples in a micro-batch for BatchNorm, which needs two values of every "
            f"channel: use a smaller pipeline.M or a larger data.batch_size ({self})"
        )


@dataclass(frozen=True)
class TensorShape:
    """Describes a tensor without its values."""

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
        """Returns the size of a tensor of this shape without gaps."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def fake_mode() -> FakeTensorMode:
    """Returns the context in which new tensors have shapes and no memory."""
    # Real tensors may occur: those of a module that a builder's closure holds.
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_without_memory(builder: LayerBuilder, fake: FakeTensorMode) -> nn.Module:
    """Builds the layer with fake weights; with real ones if its constructor looks at values.

    Raises:
        CostError: it cannot be built.
    """
    try:
        with fake:
            module = builder.build()
    except Exception:
        return build_or_explain(builder)
    refuse_parameters(builder.name, module)
    return module


def build_or_explain(builder: LayerBuilder) -> nn.Module:
    try:
        module = builder.build()
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
            raise CostError(
                f"layer {layer!r}: parameter {name!r} gets its shape only from the first input, as nn.LazyLinear's "
                "does: give the sizes, as nn.Linear(in_features, out_features)"
            )
        if parameter.is_complex():
            raise CostError(
                f"layer {layer!r}: parameter {name!r} is complex ({str(parameter.dtype).removeprefix('torch.')}): keep "
                "a real parameter with a last dimension of 2, and use torch.view_as_complex(parameter) in forward"
            )


@contextmanager
def explaining_failures(builder: LayerBuilder, shapes: Sequence[TensorShape]) -> Iterator[None]:
    """Turns an exception into a CostError that names the layer, its inputs and the way out."""
    given = f"layer {builder.name!r}, given {', '.join(map(str, shapes))}"
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error  # a cell's error names the layer, and has the layer's own as cause
        if "Expected more than 1 value per channel" in str(cause):  # torch's, of BatchNorm on a single value
            raise TooFewExamples(given) from error
        raise CostError(
            f"{given}, fails while its cost is measured: {type(cause).__name__}: {cause}; if it runs in training, "
            "gpipe-train takes pipeline.cost=parameters"
        ) from error


def build_key(builder: LayerBuilder, index: int) -> Hashable:
    """Returns equal keys for layers built alike (classes and partials with equal arguments), else ``index``."""
    if not isinstance(builder.build, (partial, type)):
        return index
    key = _frozen(builder.build)
    try:
        hash(key)
    except TypeError:
        return index
    return key


def _frozen(value: object) -> Hashable:
    """Turns partials, lists and dicts into tuples; each value goes with its type, because 1, 1.0 and True are equal."""
    if isinstance(value, partial):
        return (partial, _frozen(value.func), _frozen(value.args), _frozen(value.keywords))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, Mapping):
        return (type(value), frozenset((key, _frozen(item)) for key, item in value.items()))
    return (type(value), value)
