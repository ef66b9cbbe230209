"""Compares two ways to run one training step: which quantities differ, by how much, and in which layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..difference import MISSING, Difference, Gap, Key, Quantity, judge, judge_tensors
from .record import Fingerprint, Point, number_gap

SUMMED = 1e-14  # relative; float64 sums of the same numbers in another order differ by no more

BEGIN, RESUMED, SKIPPED = "weights at the beginning", "all that a resume restores", "unchanged by a skipped step"
LOSS, LOSSES, STATISTICS = "loss", "losses of micro-batches", "statistics of the task"
USED, SEEDS, MODES = "weights used", "seeds of dropout", "modes of layers"
OUTPUTS, GIVEN_AGAIN, AGAIN = "outputs of layers", "inputs in recompute", "outputs recomputed"
PASSED_BACK, GRADIENTS, NORM = "gradients between layers", "gradients", "gradient norm"
CLIPPED, RATES = "clipping", "learning rate"
BUFFERS, STATE, UPDATED = "BatchNorm and other buffers", "optimizer state", "weights after"
EVALUATED, METRICS, KEPT = "outputs in evaluation", "numbers of an evaluation", "unchanged by an evaluation"
AVERAGES, REPLICAS = "averages of weights", "replicas after"


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


def equal(name: str, found: Iterable[tuple[int, str, bool]]) -> Quantity:
    """Judges what must be the same; given for each place its layer, its name, and whether both sides are equal."""
    gaps = [(layer, where, 0.0 if same else math.inf) for layer, where, same in found]
    gaps.sort(key=lambda gap: gap[0])
    return judge(name, [Difference(layer, where, gap, gap) for layer, where, gap in gaps], 0.0)


# -- tensors ---------------------------------------------------------------------------------------------------------


Gaps = dict[Key, Gap]


def tensors(name: str, gaps: Gaps, tolerance: float, changes: bool = False) -> Quantity:
    """Judges the tensors of one kind, in layer order; see `judge_tensors`."""
    return judge_tensors(name, sorted(gaps.items(), key=lambda gap: gap[0]), tolerance, changes=changes)


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
    return judge(name, found, tolerance)


def traces(
    name: str, pairs: Iterable[tuple[Point, Fingerprint | None, Fingerprint]], run: VerifiedRun, tolerance: float
) -> Quantity:
    """Judges fingerprints of the pipeline and of the plain side; a gradient of zero (of the unused) may be missing."""
    found = []
    for point, ours, plain in sorted(pairs, key=lambda pair: (pair[0].layer, pair[0])):
        where = run.micro_batch(*point[:3])
        if ours is not None:
            found.append(((point.layer, where), ours.gap(plain)))
        elif plain.norm:
            found.append(((point.layer, f"{where}: missing"), MISSING))
    return judge_tensors(name, found, tolerance, kind=lambda key: key[0])
