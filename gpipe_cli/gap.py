"""Measures how far a tensor is from the one that it should equal: for gpipe-verify and for traced modules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gap:
    """Holds what there is to know of two tensors in order to compare them.

    Attributes:
        absolute: largest difference of two elements; infinite where shapes differ, or which elements are finite.
        distance: norm of the difference; infinite where `absolute` is.
        ours, plain: norms of the two; of their changes, where the step began with values.
        size: norm of the plain one itself.
        epsilon: relative precision of its type.
    """

    absolute: float
    distance: float
    ours: float
    plain: float
    size: float
    epsilon: float


MISSING = Gap(math.inf, math.inf, 0.0, 0.0, 0.0, 0.0)


def measure(ours: Tensor | None, plain: Tensor | None, before: Tensor | None = None) -> Gap:
    """Compares two tensors; elements that are finite on neither side agree.

    Args:
        before: the value before the step; the norms are then those of the changes.
    """
    if ours is None or plain is None or ours.shape != plain.shape:
        return MISSING
    x, y = _in_float64(ours), _in_float64(plain)
    finite = torch.isfinite(x)
    if not torch.equal(finite, torch.isfinite(y)):
        return MISSING
    x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    size, epsilon = _norm(y), torch.finfo(plain.dtype).eps if plain.is_floating_point() else 0.0
    gap = x - y
    if before is not None:
        old = torch.where(finite, _in_float64(before), 0.0)
        x, y = x - old, y - old
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    return Gap(largest, _norm(gap), _norm(x), _norm(y), size, epsilon)


def _in_float64(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().double().cpu()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
