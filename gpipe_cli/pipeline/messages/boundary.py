"""Describes and packs boundaries: the tensors that pass from one layer, and one cell, to the next.

One tensor, or a tuple of tensors, needs no grouping. For anything else (nested tuples, lists and dicts, with None and
plain numbers and texts among the tensors) the grouping is a JSON text, which can be compared and sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...micro_batch import Tensors

ALIGNMENT = 256  # bytes; a packed tensor starts at a multiple: cuBLASLt chooses kernels by alignments up to this
T = TypeVar("T")


class Grouped(tuple[T, ...], Generic[T]):
    """Holds the tensors of a layer's output, or something for each of them, and how they were grouped."""

    grouping: str

    def __new__(cls, items: Iterable[T], grouping: str) -> Grouped[T]:
        made = super().__new__(cls, items)
        made.grouping = grouping
        return made


def grouping_of(items: Sequence[object]) -> str | None:
    """Returns the grouping as JSON; None for a plain tuple."""
    return getattr(items, "grouping", None)


def grouped(items: Iterable[T], grouping: str | None) -> tuple[T, ...]:
    """Returns the items as `Grouped` with this grouping, or as a plain tuple if it is None."""
    return tuple(items) if grouping is None else Grouped(items, grouping)


def grouped_like(items: Iterable[T], other: Sequence[object]) -> tuple[T, ...]:
    """Returns the items with the grouping of ``other``."""
    return grouped(items, grouping_of(other))


def as_tensors(value: object) -> Tensors:
    """Returns a layer's output as a tuple of its tensors; `Grouped` if it was neither a tensor nor a plain tuple.

    Raises:
        TypeError: there is no tensor in the output, or something that cannot pass to another process.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    leaves, structure = pytree.tree_flatten(value, is_leaf=_is_leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Among the leaves a list stands for a tensor: a list in the output is part of the structure.
    others = [[] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    refused = [leaf for leaf in others if leaf != [] and type(leaf) not in (type(None), bool, int, float, str)]
    if refused or not tensors:
        found = type(refused[0] if refused else value).__name__
        raise TypeError(
            "a layer returns a tensor, or tensors in tuples, lists and dicts (keys: texts or whole numbers), with None "
            f"and plain numbers among them, not {found}: return its tensors, one beside the other"
        )
    return Grouped(tensors, json.dumps([_encoded(structure), others]))


def as_argument(tensors: Sequence[Tensor]) -> Any:
    """Returns the argument of a layer: one tensor alone, several as a tuple, `Grouped` ones as they were."""
    if isinstance(tensors, Grouped):
        structure, others = _decoded(tensors.grouping)
        following = iter(tensors)
        return pytree.tree_unflatten([next(following) if leaf == [] else leaf for leaf in others], structure)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def replace_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a layer's output or argument with ``function`` of each tensor in place of the tensor."""
    return pytree.tree_map_only(Tensor, function, value)


def _is_leaf(value: object) -> bool:
    """Returns whether the value is no plain container; one of another kind would arrive as something else."""
    if isinstance(value, dict) and any(type(key) not in (str, int) for key in value):
        return True
    return type(value) not in (tuple, list, dict)


@lru_cache(maxsize=256)
def _encoded(structure: pytree.TreeSpec) -> str:
    """Returns torch's description of nested containers as text."""
    return pytree.treespec_dumps(structure)


@lru_cache(maxsize=256)
def _decoded(grouping: str) -> tuple[pytree.TreeSpec, list[Any]]:
    """Returns the containers and the leaves of a grouping, [] in place of each tensor."""
    structure, others = json.loads(grouping)
    return pytree.treespec_loads(structure), others


# -- layouts ---------------------------------------------------------------------------------------------------------


def is_channels_last(tensor: Tensor) -> bool:
    """Returns whether the tensor is laid out as (N, H, W, C) and not also as (N, C, H, W)."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def canonical(tensor: Tensor) -> Tensor:
    """Returns the same values in the layout that every boundary has: contiguous, or channels-last, and aligned.

    Kernels choose their order of summation by strides and alignment, and a message keeps neither of a part of a larger
    tensor. So that a cut changes no bit, tensors between two layers are brought to this layout whether a cut lies there
    or not.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.storage_offset() * tensor.itemsize % ALIGNMENT:
        tensor = tensor.clone()
    if tensor.is_contiguous():
        # A dimension of size 1 may have any stride, and some kernels use it.
        is_odd = 1 in tensor.shape and tensor.stride() != _strides_of(tensor.shape)
        return tensor.view(-1).view(tensor.shape) if is_odd else tensor
    return tensor if is_channels_last(tensor) else tensor.contiguous()


def passed_on(outputs: Tensors, inputs: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Returns a layer's outputs as the next layer gets them.

    Tensors that the layer only passes on from its ``inputs`` stay as they are.

    Args:
        dtype: type that floating-point outputs get; None: they keep theirs.
    """
    if dtype is None:
        return outputs
    cast = (
        tensor.to(dtype) if tensor.is_floating_point() and not any(tensor is one for one in inputs) else tensor
        for tensor in outputs
    )
    return grouped_like(cast, outputs)


def _strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def canonical_gradient(gradient: Tensor, of_channels_last: bool) -> Tensor:
    """Returns the gradient in the canonical layout.

    Args:
        of_channels_last: True if the gradient's tensor is channels-last, as the gradient then must be.
    """
    layout = torch.channels_last if of_channels_last else torch.contiguous_format
    return canonical(gradient.contiguous(memory_format=layout))


class GradientLayouts:
    """Brings the outputs of layers, and the gradients that come back to them, to the `canonical` layout.

    A hook on every tensor would cost 2 % of a small model's step. Layouts follow from shapes, so shapes whose gradient
    has once been canonical need no hook later.
    """

    def __init__(self) -> None:
        # By (layer, number of the output, signature): whether its gradients had to be brought to their layout.
        self._odd: dict[Hashable, bool] = {}

    def settle(
        self, outputs: Tensors, inputs: Tensors, dtype: torch.dtype | None, layer: int, signature: Hashable
    ) -> tuple[Tensors, bool]:
        """Returns a layer's outputs in the canonical layout, and whether later ones of these shapes need no `settle`.

        Tensors that the layer only passes on from its ``inputs`` are canonical already.

        Args:
            dtype: type that floating-point outputs get; None: they keep theirs.
            layer: index of the layer.
            signature: shapes and types of the micro-batch, from which those of the outputs follow.
        """
        from_inputs, made, is_settled = {id(tensor) for tensor in inputs}, list(passed_on(outputs, inputs, dtype)), True
        for number, tensor in enumerate(made):
            if id(tensor) in from_inputs:
                continue
            settled = made[number] = canonical(tensor)
            is_settled = is_settled and settled is outputs[number]
            if settled.requires_grad and self._odd.get((layer, number, signature), True):
                self._settle_gradient(settled, (layer, number, signature))
                is_settled = False
        return grouped_like(made, outputs), is_settled

    def _settle_gradient(self, tensor: Tensor, place: Hashable) -> None:
        """Hooks the tensor, so that its gradient is brought to the tensor's layout when it arrives.

        Args:
            place: key in `_odd`.
        """
        last = is_channels_last(tensor)

        def bring_to_layout(gradient: Tensor) -> Tensor:
            settled = canonical_gradient(gradient, last)
            self._odd[place] = self._odd.get(place, False) or settled is not gradient
            return settled

        tensor.register_hook(bring_to_layout)  # type: ignore[no-untyped-call]  # torch's own


@dataclass(frozen=True)
class TensorSpec:
    """Describes one tensor of a boundary.

    Attributes:
        needs_gradient: a gradient may flow back through it.
        on_host: True for flags, which the receiver reads at once, so they stay on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    channels_last: bool = False
    on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describes a tensor.

        Raises:
            TypeError: it is sparse or quantized.
        """
        if tensor.is_quantized or tensor.layout is not torch.strided:  # its bytes are not its values
            raise TypeError("a sparse or quantized tensor cannot pass to the next layer: return a dense one")
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_channels_last(tensor))

    def view_of(self, message: Tensor, start: int) -> Tensor:
        """Returns a view of the tensor that begins at byte ``start`` of a message.

        The message must begin at the first byte of its storage.
        """
        return message.view(self.dtype).as_strided(self.shape, self._strides, start // self.dtype.itemsize)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Returns the strides in elements, of a contiguous tensor or a channels-last one."""
        if self.channels_last:
            _, channels, height, width = self.shape
            return (channels * height * width, 1, width * channels, channels)
        return _strides_of(self.shape)

    @property
    def size(self) -> int:
        """Returns the tensor's bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BoundarySpec:
    """Describes the tensors of one boundary, for one shape of micro-batch.

    Attributes:
        grouping: containers in which the tensors stood, as JSON; None: one tensor, or a plain tuple.
        varies: True if a tensor may require a gradient in one micro-batch and none in another.
    """

    tensors: tuple[TensorSpec, ...]
    grouping: str | None = None
    varies: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> BoundarySpec:
        """Describes these tensors and their grouping."""
        return cls(tuple(TensorSpec.of(tensor) for tensor in tensors), grouping_of(tensors))

    def with_takers(self, takers: Collection[int]) -> BoundarySpec:
        """Returns a description in which the tensors of these indices, and no others, may require a gradient."""
        tensors = tuple(replace(t, needs_gradient=n in takers) for n, t in enumerate(self.tensors))
        return replace(self, tensors=tensors, varies=tensors != self.tensors)

    def followed_by(self, targets: Sequence[Tensor]) -> BoundarySpec:
        """Describes a message of the boundary's tensors, then the targets, then flags where `varies` is set."""
        flags = (_flags(len(self.takers)),) if self.varies else ()
        return replace(self, tensors=self.tensors + BoundarySpec.of(targets).tensors + flags)

    @cached_property
    def takers(self) -> tuple[int, ...]:
        """Returns the indices of the tensors that may require a gradient (the takers)."""
        return tuple(number for number, tensor in enumerate(self.tensors) if tensor.needs_gradient)

    @cached_property
    def gradients(self) -> BoundarySpec:
        """Describes the message that travels back.

        It holds a gradient for each tensor that may have one (`takers`), then a uint8 tensor with 1 for each gradient
        that exists and 0 for each that does not.
        """
        gradients = tuple(replace(self.tensors[number], needs_gradient=False) for number in self.takers)
        return BoundarySpec((*gradients, _flags(len(gradients))) if gradients else ())

    @property
    def has_flags(self) -> bool:
        """Returns whether the last tensor holds flags: which of the others require a gradient, or exist as one."""
        return bool(self.tensors) and self.tensors[-1].on_host

    @cached_property
    def without_flags(self) -> BoundarySpec:
        """Describes the same message without its last tensor, the flags, which then travel beside it."""
        return replace(self, tensors=self.tensors[:-1])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Returns the byte at which each tensor starts in a packed message, and last the message's length in bytes.

        A single tensor is a message without padding.
        """
        alignment = 1 if len(self.tensors) == 1 else ALIGNMENT
        return tuple(accumulate((-(-t.size // alignment) * alignment for t in self.tensors), initial=0))

    @property
    def size(self) -> int:
        """Returns the bytes of the packed message."""
        return self.offsets[-1]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the tensors are as many as described, with these shapes, types and this grouping."""
        return (
            len(tensors) == len(self.tensors)
            and grouping_of(tensors) == self.grouping
            and all(t.shape == one.shape and t.dtype == one.dtype for t, one in zip(tensors, self.tensors, strict=True))
        )

    def __str__(self) -> str:
        """Returns types, shapes and grouping as text."""
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors)
        return shapes if self.grouping is None else f"{shapes} (grouped as {self.grouping})"

    def to_json(self) -> str:
        """Encodes the description for the next worker; nothing that arrives from another process is unpickled."""
        rows = [
            [list(t.shape), str(t.dtype).removeprefix("torch."), t.needs_gradient, t.channels_last, t.on_host]
            for t in self.tensors
        ]
        return json.dumps([rows, self.grouping])

    @classmethod
    def from_json(cls, text: str) -> BoundarySpec:
        """Decodes the text of `to_json`."""
        rows, grouping = json.loads(text)
        tensors = tuple(TensorSpec(tuple(shape), getattr(torch, dtype), *flags) for shape, dtype, *flags in rows)
        return cls(tensors, grouping)


def pack(tensors: Sequence[Tensor], spec: BoundarySpec, device: torch.device) -> Tensor:
    """Returns the tensors as one message on ``device``: a flat uint8 tensor of ``spec.size`` bytes.

    A single tensor that already has the layout of a message is not copied: the message is a view of it.
    """
    if len(tensors) == 1 and not spec.tensors[0].channels_last:
        tensor = tensors[0].detach().resolve_conj().resolve_neg()
        if tensor.is_contiguous() and tensor.device == device and tensor.dtype is spec.tensors[0].dtype:
            return tensor.view(-1).view(torch.uint8)
    message = torch.empty(spec.size, dtype=torch.uint8, device=device)
    for place, tensor in zip(unpack(message, spec), tensors, strict=True):
        place.copy_(tensor.detach())
    return message


def unpack(message: Tensor, spec: BoundarySpec) -> Tensors:
    """Returns the tensors of a packed message, as views."""
    return tuple(t.view_of(message, start) for t, start in zip(spec.tensors, spec.offsets, strict=False))


def fresh_leaves(tensors: Tensors, takers: Collection[int] | None = None) -> Tensors:
    """Returns the boundary in front of a cell: detached tensors, of which some collect gradients.

    Args:
        takers: indices of the tensors that collect gradients; None: those that require a gradient now.
    """
    leaves = (
        tensor.detach().requires_grad_(tensor.requires_grad if takers is None else number in takers)
        for number, tensor in enumerate(tensors)
    )
    return grouped_like(leaves, tensors)


def _flags(count: int) -> TensorSpec:
    """Describes the flags of a message: a uint8 tensor, one byte for each tensor that has a flag."""
    return TensorSpec((count,), torch.uint8, False, on_host=True)
