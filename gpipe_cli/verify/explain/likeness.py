"""Finds from fingerprints what a tensor is instead: that of another micro-batch, zero, or a multiple."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..layout import VerifiedRun
from ..record import Fingerprint, Place, Point

SAME = 1e-6  # relative; fingerprints of two tensors that only rounding tells apart
BFLOAT16 = (
    2.0**-13,
    2.0**-7,
)  # relative; how far a tensor is from itself rounded to bfloat16, and what follows from it

Marks = Mapping[Point, Fingerprint]


def likeness(mark: Fingerprint, point: Point, plain: Marks, run: VerifiedRun) -> str:
    """Returns what the tensor at ``point`` is instead; "" where that is not known."""
    if mark.norm == 0:
        return "it is zero"
    for other, right in plain.items():
        if (other.layer, other.number) == (point.layer, point.number) and other != point and _same(mark, right):
            return f"it is that of {place_in_words((other.replica, other.micro_batch), point, run)}"
    factor = _multiple(mark, plain[point])
    return "" if factor is None else f"it is {in_factors(factor, run)}"


def place_in_words(place: Place, instead_of: Point, run: VerifiedRun) -> str:
    """Returns "micro-batch 1", or "replica 0" where only the replica differs."""
    if run.replicas > 1 and place[1] == instead_of.micro_batch:
        return f"replica {place[0]}"
    return run.micro_batches([place])


def in_factors(factor: float, run: VerifiedRun) -> str:
    """Returns "0.5 times as large as in the plain loop", and the number of micro-batches or replicas if it is that."""
    names = {"M": run.M, "the number of replicas": run.replicas}
    for name, value in names.items():
        if value > 1 and abs(factor * value - 1) < 1e-2:
            return f"{factor:.4g} times as large as in the plain loop: divided by {name} = {value}"
        if value > 1 and abs(factor / value - 1) < 1e-2:
            return f"{factor:.4g} times as large as in the plain loop: scaled by {name} = {value}"
    return f"{factor:.4g} times as large as in the plain loop"


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    return a.distance(b) <= SAME * max(b.norm, 1e-30)


def _multiple(mark: Fingerprint, right: Fingerprint) -> float | None:
    if not right.norm or not right.projection or not math.isfinite(mark.norm):
        return None
    factor, other = mark.norm / right.norm, mark.projection / right.projection
    alike = abs(abs(other) - factor) <= 1e-3 * factor and abs(other - 1) > 1e-2
    return other if alike else None
