"""Says which quantities differ between two ways to run a training step, where, and what a user can do about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..difference import MISSING, NO_LAYER, Difference, Gap, Key, Quantity, judge, judge_tensors
from .record import Fingerprint, Point, number_gap

SUMMED = 1e-14  # relative; float64 sums of the same numbers in another order differ by no more

BEGIN, RESUMED, SKIPPED = "weights at the beginning", "all that a resume restores", "unchanged by a skipped step"
LOSS, LOSSES, STATISTICS = "loss", "losses of micro-batches", "statistics of the task"
USED, OUTPUTS, AGAIN = "weights used", "outputs of layers", "outputs recomputed"
PASSED_BACK, GRADIENTS, NORM = "gradients between layers", "gradients", "gradient norm"
CLIPPED, RATES = "clipping", "learning rate"
BUFFERS, STATE, UPDATED = "BatchNorm and other buffers", "optimizer state", "weights after"
EVALUATED, METRICS, KEPT = "outputs in evaluation", "numbers of an evaluation", "unchanged by an evaluation"
AVERAGES, REPLICAS = "averages of weights", "replicas after"

ORDER = (
    *(BEGIN, RESUMED, SKIPPED, USED, OUTPUTS, AGAIN, LOSSES, LOSS, STATISTICS, GRADIENTS, NORM, BUFFERS, CLIPPED),
    *(RATES, STATE, UPDATED, AVERAGES, REPLICAS, EVALUATED, METRICS, KEPT),
)  # a difference in one makes differences in those behind it
HINTS = {
    BEGIN: "the builder of a layer must draw weights from torch's generator, which is seeded for every layer",
    LOSSES: "the outputs of all layers agree: the loss, of the task or of a layer, depends on more than outputs and "
    "targets, or was given other targets",
    AVERAGES: "the weights are right, their averages (trainer.average) are not",
}
OF_BATCHNORM = (".running_mean", ".running_var", ".num_batches_tracked")

Found = Mapping[str, Quantity]  # of one step, by name
Gaps = dict[Key, Gap]


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


def agrees(found: Found) -> bool:
    """Returns whether all results agree. Gradients between layers only help to find an error's place."""
    return not any(quantity.beyond for name, quantity in found.items() if name != PASSED_BACK)


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
        of_replica = f" of replica {point.replica}" if point.replica else ""
        where = f"{run.names[point.layer]}, micro-batch {point.micro_batch}{of_replica}"
        if ours is not None:
            found.append(((point.layer, where), ours.gap(plain)))
        elif plain.norm:
            found.append(((point.layer, f"{where}: missing"), MISSING))
    return judge_tensors(name, found, tolerance, kind=lambda key: key[0])


# -- what a user reads -------------------------------------------------------------------------------------------------


def findings(steps: Mapping[int, Found], run: VerifiedRun, batchnorms: Collection[int]) -> list[str]:
    """Returns as sentences the first difference and what a user can do about it; empty when no step differs.

    Args:
        steps: what was compared, by number.
        batchnorms: layers that have one.
    """
    number = next((number for number, found in steps.items() if not agrees(found)), None)
    if number is None:
        return []
    now = steps[number]
    name = min((name for name, q in now.items() if q.beyond and name != PASSED_BACK), key=ORDER.index)
    quantity, from_loss = now[name], name == GRADIENTS
    first = max(quantity.beyond, key=lambda d: d.layer) if from_loss else quantity.beyond[0]
    place = "" if first.layer == NO_LAYER else run.place(first.layer)
    found = (
        f"step {number}, {name}: {len(quantity.beyond)} of {quantity.compared} differ, "
        f"first{' from the loss back' if from_loss else ''}{place and f' in {place}'} "
        f"({first.where}, relative difference {first.relative:.1e})"
    )
    hint = HINTS.get(name, "")
    if name in (OUTPUTS, AGAIN):
        repeated = now[AGAIN].beyond if AGAIN in now else []
        again = any(difference.layer == first.layer for difference in repeated)
        hint = _of_layer(first.layer, place, again, first.layer in batchnorms)
    elif name == BUFFERS and first.where.endswith(OF_BATCHNORM):
        hint = "outputs agree: only the moving averages of BatchNorm differ, which an evaluation uses"
    elif name == BUFFERS:
        hint = f"{place} changes a buffer of its own in forward, and again in recompute"
    return [found, f"step {number}: {hint}"] if hint else [found]


def _of_layer(layer: int, place: str, again: bool, batchnorm: bool) -> str:
    """Returns what may be wrong with a layer that has the right weights.

    Args:
        again: whether its recompute differs from its first forward.
        batchnorm: whether it has one.
    """
    changing = "something that changes between two calls, such as random numbers that are not torch's"
    if batchnorm:
        changing += ", or its BatchNorm normalises by other statistics than its micro-batch's"
    if again:
        return f"{place} gives something else when it is computed again: it depends on {changing}"
    if layer == 0:
        return f"{place} is the first: the data source must give the same mini-batches whenever it is read"
    return f"the layers before {place} agree: it depends on {changing}, or was given another input"
