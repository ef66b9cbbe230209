"""Measures how far tensors are from those that they should equal, and judges which of them differ.

Both gpipe-verify and the comparison of traced modules judge so: tensors are measured one at a time (`Gap`), and judged
when all of their kind have been measured. A difference is divided by the norm of the right side's tensor, but at least
by a small share of the norm of all tensors of the kind (a gradient that is nothing but rounding may differ by all of
itself). Up to a tolerance it is rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SMALL_SHARE = 0.01  # tensors smaller than this share of all of their kind are measured by this share of all
TINY = 1e-30  # divides a difference where the norm is zero
NO_LAYER = -1  # for quantities of the whole model

Key = tuple[int, str]  # (index of the layer, full name of the tensor)


@dataclass(frozen=True)
class Gap:
    """Holds the distance of two compared tensors, and the size of the plain one.

    Attributes:
        absolute: largest difference of two elements; infinite where shapes differ, or which elements are finite.
        distance: norm of the difference; infinite where `absolute` is.
        plain: norm of the plain side; where a value from before the step is known, norm of its change.
        size: norm of the plain side itself.
        epsilon: relative precision of its type.
    """

    absolute: float
    distance: float
    plain: float
    size: float
    epsilon: float


MISSING = Gap(math.inf, math.inf, 0.0, 0.0, 0.0)


def measure(ours: Tensor | None, plain: Tensor | None, before: Tensor | None = None) -> Gap:
    """Measures the gap between two tensors. Elements that are finite on neither side agree.

    Args:
        ours, plain: the tensors of both sides; None: that side has none.
        before: the value before the step; `Gap.plain` is then the norm of the change.
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
        y = y - torch.where(finite, _in_float64(before), 0.0)
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    return Gap(largest, _norm(gap), _norm(y), size, epsilon)


def _in_float64(tensor: Tensor) -> Tensor:
    """Returns the values in float64 on the CPU; complex numbers as pairs."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().double().cpu()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


# -- judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Holds the difference of one tensor, fingerprint or number between the two sides.

    Attributes:
        layer: its layer, `NO_LAYER` for the whole model.
        where: its name, for the report.
        absolute: largest difference of two elements (of fingerprints: of the two norms).
        relative: norm of the difference divided by the norm that the quantity is measured by; inf where one side has
            nothing.
    """

    layer: int
    where: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.where}: relative difference {self.relative:.1e}"


@dataclass(frozen=True)
class Quantity:
    """Holds the differences of one kind, such as all gradients.

    Attributes:
        name: name in the report.
        compared: their number.
        worst: the largest relative difference; None where there are none.
        beyond: the differences beyond the tolerance, in the order in which they were found.
    """

    name: str
    compared: int
    worst: Difference | None
    beyond: list[Difference] = field(default_factory=list)

    @property
    def relative(self) -> float:
        """Returns the largest relative difference."""
        return self.worst.relative if self.worst else 0.0

    @property
    def verdict(self) -> str:
        if self.beyond:
            return f"DIFFERS ({len(self.beyond)} of {self.compared})"
        return "bit for bit" if self.worst is None or self.worst.absolute == self.worst.relative == 0 else "OK"


def judge_tensors(
    name: str,
    gaps: Sequence[tuple[Key, Gap]],
    tolerance: float,
    small: float = SMALL_SHARE,
    changes: bool = False,
    kind: Callable[[Key], object] = lambda key: key[1].partition(":")[2],
) -> Quantity:
    """Judges the gaps of tensors. A relative difference above ``tolerance`` is an error.

    Args:
        small: a gap is divided by at least this share of the norm of all tensors of its kind.
        changes: the gaps are those of changes, so that rounding of the whole value is allowed for.
        kind: returns the kind of a key: by default what is behind a colon, as exp_avg in "weight:exp_avg".
    """
    norms: dict[object, list[float]] = {}
    for key, gap in gaps:
        norms.setdefault(kind(key), []).append(gap.plain)
    least = {one: small * math.hypot(*filter(math.isfinite, its_norms)) for one, its_norms in norms.items()}
    found = []
    for key, gap in gaps:
        rounding = 8 * gap.epsilon / tolerance * gap.size if changes else 0.0
        relative = gap.distance / max(gap.plain, least[kind(key)], rounding, TINY)
        found.append(Difference(*key, gap.absolute, relative))
    worst = max(found, key=lambda d: (d.relative, d.absolute), default=None)
    return Quantity(name, len(found), worst, [d for d in found if d.relative > tolerance])
