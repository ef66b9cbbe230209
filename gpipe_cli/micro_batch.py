"""Defines the types of a micro-batch, which data sources, tasks and the pipeline share. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .errors import ConfigurationError

if TYPE_CHECKING:  # preparing a corpus needs no torch
    from collections.abc import Callable

    from torch import Tensor

Tensors: TypeAlias = "tuple[Tensor, ...]"

Loss: TypeAlias = "Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]"
"""Maps outputs and targets to the loss, a sum over the examples, and the sums of the task's statistics."""

MicroBatch: TypeAlias = "tuple[Tensors, Tensors]"
"""`(inputs, targets)`: tensors whose first dimension counts examples."""


def refuse_unlike_lengths(inputs: Tensors, targets: Tensors) -> None:
    """Raises ConfigurationError where the first dimensions, which count examples, are not the same."""
    sides = {"inputs": inputs, "targets": targets}
    lengths = {f"{side}[{i}]": [*tensor.shape[:1]] for side, own in sides.items() for i, tensor in enumerate(own)}
    if len({*map(tuple, lengths.values())}) > 1 or [] in lengths.values():
        found = ", ".join(f"{name} {length[0] if length else 'has none'}" for name, length in lengths.items())
        raise ConfigurationError(f"the first dimension counts examples, the same in all tensors, but it is: {found}")
