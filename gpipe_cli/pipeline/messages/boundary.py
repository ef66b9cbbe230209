"""Describes and packs boundaries: the tuples of tensors that pass from one cell to the next."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from ...micro_batch import Tensors
from .grouping import grouped, grouped_like, grouping_of

ALIGNMENT = 256  # bytes; a packed tensor starts at a multiple: cuBLASLt chooses kernels by alignments up to this


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
    """Returns a layer's outputs as the next layer gets them: floating-point ones in ``dtype``; None: as they are.

    Tensors that the layer only passes on from its ``inputs`` stay as they came.
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
    """Returns the gradient in the layout of its tensor."""
    layout = torch.channels_last if of_channels_last else torch.contiguous_format
    return canonical(gradient.contiguous(memory_format=layout))


class GradientLayouts:
    """Brings the outputs of layers, and the gradients that come back to them, to the `canonical` layout.

    A hook on every tensor would cost 2 % of a small model's step. Layouts follow from shapes, so shapes whose gradient
    has once been canonical need no hook later.
    """

    def __init__(self) -> None:
        self._odd: dict[Hashable, bool] = {}

    def settle(self, outputs: Tensors, inputs: Tensors, layer: int, signature: Hashable) -> Tensors:
        """Returns ``outputs`` of ``layer`` in canonical layout; their gradients will be brought to it when they come.

        Tensors that the layer only passes on from its ``inputs`` are canonical already.
        """
        came, made = {id(tensor) for tensor in inputs}, list(outputs)
        for number, tensor in enumerate(outputs):
            if id(tensor) not in came:
                made[number] = self._settle_one(canonical(tensor), (layer, number, signature))
        return grouped_like(made, outputs)

    def is_known(self, outputs: Tensors, inputs: Tensors, layer: int, signature: Hashable) -> bool:
        """Returns whether no gradient of a layer's outputs needs a hook any more."""
        came = {id(tensor) for tensor in inputs}
        new = [number for number, one in enumerate(outputs) if one.requires_grad and id(one) not in came]
        return {self._odd.get((layer, number, signature)) for number in new} <= {False}

    def _settle_one(self, tensor: Tensor, place: Hashable) -> Tensor:
        if tensor.requires_grad and self._odd.get(place, True):
            last = is_channels_last(tensor)

            def bring_to_layout(gradient: Tensor) -> Tensor:
                settled = canonical_gradient(gradient, last)
                self._odd[place] = self._odd.get(place, False) or settled is not gradient
                return settled

            tensor.register_hook(bring_to_layout)  # type: ignore[no-untyped-call]  # torch's own
        return tensor


@dataclass(frozen=True)
class TensorSpec:
    """Describes one tensor of a boundary.

    Attributes:
        needs_gradient: a gradient may flow back through it.
        on_host: the receiver reads it at once, so it stays on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    channels_last: bool = False
    on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        if tensor.is_quantized or tensor.layout is not torch.strided:  # its bytes are not its values
            raise TypeError("a sparse or quantized tensor cannot pass to the next layer: return a dense one")
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_channels_last(tensor))

    def view_of(self, message: Tensor, start: int) -> Tensor:
        """Returns the tensor that begins at byte ``start`` of a message, as a view; the message has its own storage."""
        return message.view(self.dtype).as_strided(self.shape, self._strides, start // self.dtype.itemsize)

    def bytes_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns the tensor's bytes in a message: a flat uint8 tensor, a view where nothing has to change."""
        if tensor.requires_grad or tensor.dtype is not self.dtype or tensor.device != device:
            tensor = tensor.detach().to(device, self.dtype)
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
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
        grouping: see `grouping.py`.
        varies: which tensors take a gradient differs from micro-batch to micro-batch: each message says it in `flags`,
            behind the boundary's own tensors.
    """

    tensors: tuple[TensorSpec, ...]
    grouping: str | None = None
    varies: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> BoundarySpec:
        return cls(tuple(TensorSpec.of(tensor) for tensor in tensors), grouping_of(tensors))

    def with_takers(self, takers: Collection[int]) -> BoundarySpec:
        """Returns the description in which the tensors of these indices may take a gradient."""
        tensors = tuple(replace(t, needs_gradient=n in takers) for n, t in enumerate(self.tensors))
        varies = any(now.needs_gradient != t.needs_gradient for now, t in zip(tensors, self.tensors, strict=True))
        return BoundarySpec(tensors, self.grouping, varies)

    def followed_by(self, tensors: Sequence[Tensor]) -> BoundarySpec:
        """Returns the description of a message that holds these tensors behind the boundary's own."""
        flags = (_flags(len(self.takers)),) if self.varies else ()
        return replace(self, tensors=self.tensors + flags + BoundarySpec.of(tensors).tensors)

    @cached_property
    def takers(self) -> tuple[int, ...]:
        """Returns the indices of the tensors that may take a gradient."""
        return tuple(number for number, tensor in enumerate(self.tensors) if tensor.needs_gradient)

    @cached_property
    def gradients(self) -> BoundarySpec:
        """Describes the gradients that travel back: one for each of `takers`, and flags: which of them there are."""
        gradients = tuple(replace(self.tensors[number], needs_gradient=False) for number in self.takers)
        return BoundarySpec((*gradients, _flags(len(gradients))) if gradients else ())

    @cached_property
    def flags(self) -> int | None:
        """Returns the index of the tensor that says which tensors take, or are, a gradient; None: there is none."""
        return next((number for number, tensor in enumerate(self.tensors) if tensor.on_host), None)

    @cached_property
    def without_flags(self) -> BoundarySpec:
        """Describes the message whose flags travel beside it."""
        return replace(self, tensors=tuple(tensor for tensor in self.tensors if not tensor.on_host))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Returns the byte at which each tensor starts in a packed message, and last the message's length in bytes.

        A single tensor is a message without padding.
        """
        alignment = 1 if len(self.tensors) == 1 else ALIGNMENT
        return tuple(accumulate((-(-t.size // alignment) * alignment for t in self.tensors), initial=0))

    @cached_property
    def paddings(self) -> tuple[tuple[int, int], ...]:
        """Returns (number of the tensor, bytes of padding behind it) of each tensor with padding."""
        gaps = [end - start - t.size for t, (start, end) in zip(self.tensors, pairwise(self.offsets), strict=True)]
        return tuple((number, padding) for number, padding in enumerate(gaps) if padding)

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
        return json.dumps([rows, self.grouping, self.varies])

    @classmethod
    def from_json(cls, text: str) -> BoundarySpec:
        """Decodes the text of `to_json`."""
        rows, grouping, varies = json.loads(text)
        tensors = tuple(TensorSpec(tuple(shape), getattr(torch, dtype), *flags) for shape, dtype, *flags in rows)
        return cls(tensors, grouping, varies)


def pack(tensors: Sequence[Tensor], spec: BoundarySpec, device: torch.device) -> Tensor:
    """Returns the tensors as one message on ``device``: a flat uint8 tensor of ``spec.size`` bytes.

    A single tensor that already has the layout of a message is not copied: the message is a view of it. A worker that
    has just computed packs with a cold cache, where every operation costs ten times what it costs in a loop; so there
    are few operations, here and in `unpack`.
    """
    pieces = [described.bytes_of(tensor, device) for tensor, described in zip(tensors, spec.tensors, strict=True)]
    if len(pieces) == 1:
        return pieces[0]
    for number, padding in spec.paddings:
        pieces[number] = torch.nn.functional.pad(pieces[number], (0, padding))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(message: Tensor, spec: BoundarySpec) -> Tensors:
    """Returns the tensors of a packed message, as views."""
    return tuple(t.view_of(message, start) for t, start in zip(spec.tensors, spec.offsets, strict=False))


def fresh_leaves(tensors: Tensors, takers: Collection[int] | None = None) -> Tensors:
    """Returns the boundary in front of a cell: detached tensors, of which some collect gradients.

    Args:
        takers: their indices; None: those that require a gradient now.
    """
    leaves = (
        tensor.detach().requires_grad_(tensor.requires_grad if takers is None else number in takers)
        for number, tensor in enumerate(tensors)
    )
    return grouped(leaves, grouping_of(tensors))


def _flags(count: int) -> TensorSpec:
    return TensorSpec((count,), torch.uint8, False, on_host=True)
