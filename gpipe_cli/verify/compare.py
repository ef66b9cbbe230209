"""Compares two ways to run one training step: which quantities differ, by how much, and in which layer.

Tensors are measured one at a time (`Gap`), and judged when all of their kind have been measured: a difference is
divided by the norm of the plain side's tensor, but at least by `SMALL_SHARE` of the norm of all tensors of the kind
(a gradient that is nothing but rounding may differ by all of itself).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..gap import Gap
from .record import Fingerprint, Key, Point, number_gap

SMALL_SHARE = 0.01  # tensors smaller than this share of all of their kind are measured by this share of all
SUMMED = 1e-14  # relative; float64 sums of the same numbers in another order differ by no more
NO_LAYER = -1  # for quantities of the whole model

BEGIN, RESUMED, SKIPPED = "weights at the beginning", "all that a resume restores", "unchanged by a skipped step"
LOSS, LOSSES, STATISTICS = "loss", "losses of micro-batches", "statistics of the task"
USED, SEEDS, MODES = "weights used", "seeds of dropout", "modes of layers"
OUTPUTS, GIVEN_AGAIN, AGAIN = "outputs of layers", "inputs in recompute", "outputs recomputed"
PASSED_BACK, GRADIENTS, NORM = "gradients between layers", "gradients", "gradient norm"
CLIPPED, RATES = "clipping", "learning rate"
BUFFERS, STATE, UPDATED = "BatchNorm and other buffers", "optimizer state", "weights after"
EVALUATED, METRICS, KEPT = "outputs in evaluation", "numbers of an evaluation", "unchanged by an evaluation"
AVERAGES, REPLICAS = "averages of weights", "replicas after"


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


@dataclass(frozen=True)
class Quantity:
    """Holds the differences of one kind, such as all gradients.

    Attributes:
        name: for the report.
        compared: their number.
        worst: the largest relative difference; None where there are none.
        beyond: the differences beyond the tolerance, in layer order.
    """

    name: str
    compared: int
    worst: Difference | None
    beyond: list[Difference] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.beyond:
            return f"DIFFERS ({len(self.beyond)} of {self.compared})"
        if self.worst is None:
            return "none"
        return "bit for bit" if self.worst.absolute == 0 and self.worst.relative == 0 else "OK"


Found = Mapping[str, Quantity]  # of one step, by name


@dataclass(frozen=True)
class VerifiedRun:
    """Describes the model's layers and the run's division into cells, as the report shows them.

    Attributes:
        names: of the layers.
        cells: the cell of each layer.
    """

    names: Sequence[str]
    cells: Sequence[int]

    def place(self, layer: int) -> str:
        return f"layer {self.names[layer]} (cell {self.cells[layer]})"

    def micro_batch(self, replica: int, number: int, layer: int) -> str:
        return f"{self.names[layer]}, micro-batch {number}" + (f" of replica {replica}" if replica else "")


def agrees(found: Found) -> bool:
    """Returns whether all results agree. Gradients between layers only help to find an error's place."""
    return not any(quantity.beyond for name, quantity in found.items() if name != PASSED_BACK)


def judged(name: str, found: Sequence[Difference], tolerance: float) -> Quantity:
    """Returns a quantity in which every difference above ``tolerance`` counts as an error."""
    worst = max(found, key=lambda d: (d.relative, d.absolute), default=None)
    return Quantity(name, len(found), worst, [d for d in found if d.relative > tolerance])


def equal(name: str, found: Iterable[tuple[int, str, bool]]) -> Quantity:
    """Judges what must be the same; given for each place its layer, its name, and whether both sides are equal."""
    differences = [Difference(layer, where, *(2 * [0.0 if same else math.inf])) for layer, where, same in found]
    return judged(name, sorted(differences, key=lambda difference: difference.layer), 0.0)


# -- tensors ---------------------------------------------------------------------------------------------------------


Gaps = dict[Key, Gap]


def total(norms: Iterable[float]) -> float:
    """Returns the norm of all tensors together, of the norm of each; what is not finite is left out."""
    return math.sqrt(sum(norm * norm for norm in norms if math.isfinite(norm)))


def tensors(name: str, gaps: Mapping[Key, Gap], tolerance: float, changes: bool = False) -> Quantity:
    """Judges the tensors of one kind; those with a kind of their own behind a colon, as exp_avg, are measured by these.

    Args:
        changes: the gaps are those of changes, which rounding of the whole value may disturb.
    """
    norms: dict[str, list[float]] = {}
    for (_, where), gap in gaps.items():
        norms.setdefault(where.partition(":")[2], []).append(gap.plain)
    least = {kind: SMALL_SHARE * total(of_one) for kind, of_one in norms.items()}
    found = []
    for (layer, where), gap in sorted(gaps.items()):
        rounding = 8 * gap.epsilon / tolerance * gap.size if changes else 0.0
        scale = max(gap.plain, least[where.partition(":")[2]], rounding)
        relative = gap.distance / scale if scale and math.isfinite(gap.distance) else gap.distance
        found.append(Difference(layer, where, gap.absolute, relative if gap.distance else 0.0))
    return judged(name, found, tolerance)


def numbers(
    name: str, ours: Mapping[Key, float], plain: Mapping[Key, float], tolerance: float, least: float = SUMMED
) -> Quantity:
    """Judges numbers of layers, or of the whole model; what only the plain side has is a difference.

    Args:
        least: relative; less is none.
    """
    found = []
    for (layer, where), right in sorted(plain.items()):
        gap = number_gap(ours.get((layer, where), math.inf), right)
        relative = gap / abs(right) if right and math.isfinite(right) and gap else gap
        found.append(Difference(layer, where, *((gap, relative) if relative > least else (0.0, 0.0))))
    return judged(name, found, tolerance)


def traces(
    name: str, pairs: Iterable[tuple[Point, Fingerprint | None, Fingerprint]], run: VerifiedRun, tolerance: float
) -> Quantity:
    """Judges fingerprints of the pipeline and of the plain side; a gradient of zero (of the unused) may be missing."""
    ordered = sorted(pairs, key=lambda pair: (pair[0].layer, pair[0]))
    largest: dict[int, float] = {}
    for point, _, plain in ordered:
        largest[point.layer] = max(largest.get(point.layer, 0.0), plain.norm)
    found = []
    for point, ours, plain in ordered:
        where = run.micro_batch(*point[:3])
        if ours is None:
            if plain.norm:
                found.append(Difference(point.layer, f"{where}: missing", math.inf, math.inf))
            continue
        gap, scale = ours.distance(plain), max(plain.norm, SMALL_SHARE * largest[point.layer])
        relative = gap / scale if scale and math.isfinite(gap) and math.isfinite(scale) else gap
        found.append(Difference(point.layer, where, number_gap(ours.norm, plain.norm), relative))
    return judged(name, found, tolerance)
