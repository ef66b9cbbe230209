"""Describes and packs what passes from one cell to the next: tuples of tensors as one message."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from ..micro_batch import Tensors

ALIGNMENT = 64  # bytes; each tensor of a packed message starts at a multiple, so that any dtype can view it


def as_tensors(value: object) -> Tensors:
    """Returns a layer's output as a tuple.

    Raises:
        TypeError: it is neither a tensor nor a tuple or list of tensors.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    raise TypeError(f"a layer returns a tensor or a tuple of tensors, not {type(value).__name__}")


def as_argument(tensors: Sequence[Tensor]) -> Tensor | Tensors:
    """Returns the argument for a layer: one tensor alone, several as a tuple."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def is_channels_last(tensor: Tensor) -> bool:
    """Returns whether the tensor is laid out as (N, H, W, C) and not also as (N, C, H, W)."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def canonical(tensor: Tensor) -> Tensor:
    """Returns the same values in the layout of boundaries: contiguous, or channels-last.

    Kernels choose their order of summation by strides, and a message or a leaf's gradient loses unusual strides. Every
    tensor between two layers is brought to this layout, whether a cut lies there or not, so that a cut changes no bit.
    """
    if tensor.is_contiguous():
        return tensor.view(-1).view(tensor.shape) if 1 in tensor.shape and _has_odd_strides(tensor) else tensor
    return tensor if is_channels_last(tensor) else tensor.contiguous()


def _has_odd_strides(tensor: Tensor) -> bool:
    """Returns whether a stride is not the usual one; a dimension of size 1 may have any, and some kernels read it."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return True
        expected *= size
    return False


def canonical_gradient(gradient: Tensor, of_channels_last: bool) -> Tensor:
    """Returns the gradient in the layout of its tensor."""
    if of_channels_last:
        return gradient.contiguous(memory_format=torch.channels_last)
    return canonical(gradient.contiguous())


class GradientLayouts:
    """Brings each layer's outputs, and the gradients of these outputs, to `canonical` layout.

    A hook on every tensor would cost 2 % of a small model's step. The layouts follow from the shapes, so once the
    gradients for some shapes have been canonical, later ones of these shapes need no hook.
    """

    def __init__(self) -> None:
        self._odd: dict[Hashable, bool] = {}
        self._settled: dict[Hashable, set[int]] = defaultdict(set)

    def settled(self, signature: Hashable) -> set[int]:
        """Returns the layers with one output that, like its gradient, is known to be canonical.

        Args:
            signature: of the shapes that entered the pipeline.
        """
        return self._settled[signature]

    def settle(self, outputs: Tensors, inputs: Tensors, layer: int, signature: Hashable) -> Tensors:
        """Returns ``outputs`` of ``layer`` in canonical layout; their gradients are converted when they arrive.

        Tensors that the layer passes through from its ``inputs`` are canonical already.
        """
        made = tuple(
            tensor
            if any(tensor is passed for passed in inputs)
            else self._settle_one(canonical(tensor), (layer, number, signature))
            for number, tensor in enumerate(outputs)
        )
        if len(made) == 1 and made[0] is outputs[0] and self._odd.get((layer, 0, signature)) is False:
            self._settled[signature].add(layer)
        return made

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
    """Describes a tensor: shape, dtype, whether it needs a gradient, and whether it is laid out channels-last."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    channels_last: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_channels_last(tensor))

    def view_of(self, message: Tensor, start: int) -> Tensor:
        """Returns a view of the tensor at byte ``start`` of a message that is a storage of its own."""
        return message.view(self.dtype).as_strided(self.shape, self._strides, start // self.dtype.itemsize)

    def bytes_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns ``tensor`` as flat uint8 for a message: a view if nothing has to change."""
        if tensor.requires_grad or tensor.dtype is not self.dtype or tensor.device != device:
            tensor = tensor.detach().to(device, self.dtype)
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.contiguous().view(-1).view(torch.uint8)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        if self.channels_last:
            _, channels, height, width = self.shape
            return (channels * height * width, 1, width * channels, channels)
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def size(self) -> int:
        """Returns the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BoundarySpec:
    """Describes the tensors of one boundary for one shape of micro-batch."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> BoundarySpec:
        return cls(tuple(TensorSpec.of(tensor) for tensor in tensors))

    @cached_property
    def gradients(self) -> BoundarySpec:
        """Returns the specification of what travels back: one gradient for each tensor that needs one."""
        return BoundarySpec(tuple(replace(t, needs_gradient=False) for t in self.tensors if t.needs_gradient))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Returns the start of each tensor in a packed message and, last, the message's length, in bytes.

        A single tensor is not padded.
        """
        alignment = 1 if len(self.tensors) == 1 else ALIGNMENT
        return tuple(accumulate((-(-t.size // alignment) * alignment for t in self.tensors), initial=0))

    @cached_property
    def paddings(self) -> tuple[tuple[int, int], ...]:
        """Returns (number of a tensor, bytes of padding behind it) where there is padding."""
        gaps = [
            end - start - t.size for t, start, end in zip(self.tensors, self.offsets, self.offsets[1:], strict=False)
        ]
        return tuple((number, padding) for number, padding in enumerate(gaps) if padding)

    @property
    def size(self) -> int:
        """Returns the size of the packed message in bytes."""
        return self.offsets[-1]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the tensors have the described shapes."""
        return all(tensor.shape == described.shape for tensor, described in zip(tensors, self.tensors, strict=True))

    def shapes(self) -> str:
        """Returns the shapes as text for error messages."""
        return ", ".join(str(list(described.shape)) for described in self.tensors)

    def to_bytes(self) -> bytes:
        rows = [
            [list(t.shape), str(t.dtype).removeprefix("torch."), t.needs_gradient, t.channels_last]
            for t in self.tensors
        ]
        return json.dumps(rows).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundarySpec:
        rows = json.loads(data)
        return cls(tuple(TensorSpec(tuple(shape), getattr(torch, dtype), *flags) for shape, dtype, *flags in rows))


def pack(tensors: Sequence[Tensor], spec: BoundarySpec, device: torch.device) -> Tensor:
    """Packs the tensors into one message on ``device``: a flat uint8 tensor of ``spec.size`` bytes.

    The message is a view, not a copy, of a single tensor in canonical layout. After a computation the caches are cold
    and every operation costs about ten times what it costs in a loop, so this and `unpack` use few operations.
    """
    pieces = [described.bytes_of(tensor, device) for tensor, described in zip(tensors, spec.tensors, strict=True)]
    if len(pieces) == 1:
        return pieces[0]
    for number, padding in spec.paddings:
        pieces[number] = torch.nn.functional.pad(pieces[number], (0, padding))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(message: Tensor, spec: BoundarySpec) -> Tensors:
    """Returns the tensors of a packed message as views."""
    return tuple(t.view_of(message, start) for t, start in zip(spec.tensors, spec.offsets, strict=False))


def fresh_leaves(tensors: Tensors, spec: BoundarySpec) -> Tensors:
    """Returns the inputs of a cell as new autograd leaves, which collect the gradients to be sent back."""
    return tuple(
        tensor.detach().requires_grad_(described.needs_gradient)
        for tensor, described in zip(tensors, spec.tensors, strict=True)
    )
