"""Defines the types of a micro-batch, which data sources, tasks and the pipeline share. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # preparing a corpus needs no torch
    from collections.abc import Callable

    from torch import Tensor

Tensors: TypeAlias = "tuple[Tensor, ...]"

Loss: TypeAlias = "Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]"
"""Maps outputs and targets to the loss, a sum over the examples, and the sums of the task's statistics."""

MicroBatch: TypeAlias = "tuple[Tensors, Tensors]"
"""`(inputs, targets)`: tensors whose first dimension counts examples."""
