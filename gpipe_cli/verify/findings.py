"""Says where the first difference is, and what a user can do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..difference import NO_LAYER, Difference, Key
from . import compare as c
from .compare import Found, VerifiedRun

ORDER = (
    *(c.BEGIN, c.RESUMED, c.SKIPPED, c.USED, c.SEEDS, c.MODES, c.OUTPUTS, c.GIVEN_AGAIN, c.AGAIN, c.LOSSES, c.LOSS),
    *(c.STATISTICS, c.GRADIENTS, c.NORM, c.BUFFERS, c.CLIPPED, c.RATES, c.STATE, c.UPDATED, c.AVERAGES),
    *(c.REPLICAS, c.EVALUATED, c.METRICS, c.KEPT),
)  # a difference in one makes differences in those behind it
HINTS = {
    c.BEGIN: "the builder of a layer must draw weights from torch's generator, which is seeded for every layer",
    c.LOSSES: "the outputs of all layers agree: the loss, of the task or of a layer, depends on more than outputs and "
    "targets, or was given other targets",
    c.AVERAGES: "the weights are right, their averages (trainer.average) are not",
}


def findings(steps: Mapping[int, Found], run: VerifiedRun, batchnorms: Collection[Key]) -> list[str]:
    """Returns as sentences the first difference and what a user can do about it; empty when no step differs.

    Args:
        steps: what was compared, by number.
        batchnorms: of the model, by layer and name.
    """
    number = next((number for number, found in steps.items() if not c.agrees(found)), None)
    if number is None:
        return []
    now = steps[number]
    name = min((name for name, q in now.items() if q.beyond and name != c.PASSED_BACK), key=ORDER.index)
    quantity, from_loss = now[name], name == c.GRADIENTS
    first = max(quantity.beyond, key=lambda d: d.layer) if from_loss else quantity.beyond[0]
    place = "" if first.layer == NO_LAYER else f" in {run.place(first.layer)}"
    found = (
        f"step {number}, {name}: {len(quantity.beyond)} of {quantity.compared} differ, "
        f"first{' from the loss back' if from_loss else ''}{place} "
        f"({first.where}, relative difference {first.relative:.1e})"
    )
    hint = HINTS.get(name, "")
    if name in (c.OUTPUTS, c.AGAIN):
        repeated = now[c.AGAIN].beyond if c.AGAIN in now else []
        again = any(difference.layer == first.layer for difference in repeated)
        hint = _of_layer(first.layer, again, run, batchnorms)
    elif name == c.BUFFERS:
        hint = _of_buffer(first, run, batchnorms)
    return [found, f"step {number}: {hint}"] if hint else [found]


def _of_buffer(first: Difference, run: VerifiedRun, batchnorms: Collection[Key]) -> str:
    if any(layer == first.layer and first.where.startswith(f"{norm}.") for layer, norm in batchnorms):
        return "outputs agree: only the moving averages of BatchNorm differ, which an evaluation uses"
    return f"{run.place(first.layer)} changes a buffer of its own in forward, and again in recompute"


def _of_layer(layer: int, again: bool, run: VerifiedRun, batchnorms: Collection[Key]) -> str:
    """Returns what may be wrong with a layer that has the right weights, random numbers and mode.

    Args:
        again: whether its recompute differs from its first forward.
    """
    place = run.place(layer)
    changing = "something that changes between two calls, such as random numbers that are not torch's"
    if layer in {index for index, _ in batchnorms}:
        changing += ", or its BatchNorm normalises by other statistics than its micro-batch's"
    if again:
        return f"{place} gives something else when it is computed again: it depends on {changing}"
    if layer == 0:
        return f"{place} is the first: the data source must give the same mini-batches whenever it is read"
    return f"the layers before {place} agree: it depends on {changing}, or was given another input"
