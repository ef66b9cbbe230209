"""Says where the first difference is, and what a user can do about it; and what M does to BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..micro_batch import MicroBatch
from . import compare as c
from .check import Checker, ComparedStep
from .compare import Difference, Marks, Quantity, traces
from .layout import VerifiedRun
from .plain import PlainStep
from .record import INPUT, INPUT_AGAIN, OUTPUT, Point, RecordedStep

ORDER = (
    *(c.BEGIN, c.RESUMED, c.SKIPPED, c.USED, c.SEEDS, c.MODES, c.OUTPUTS, c.AGAIN, c.LOSSES, c.LOSS, c.STATISTICS),
    *(c.GRADIENTS, c.NORM, c.COUNTS, c.BUFFERS, c.CLIPPED, c.RATES, c.STATE, c.UPDATED, c.AVERAGES, c.REPLICAS),
    *(c.EVALUATED, c.NOT_AVERAGED, c.METRICS, c.KEPT),
)  # a difference in one makes differences in those behind it
HINTS = {
    c.BEGIN: "the builder of a layer must draw weights from torch's generator, which is seeded for every layer",
    c.LOSSES: "the outputs of all layers agree: the loss, of the task or of a layer, depends on more than outputs and "
    "targets, or was given other targets",
    c.AVERAGES: "the weights are right, their averages (trainer.average) are not",
    c.NOT_AVERAGED: "the weights were evaluated in place of their averages (trainer.average)",
}


def findings(steps: Sequence[ComparedStep], checker: Checker) -> list[str]:
    """Returns as sentences the first difference and what a user can do about it; empty when no step differs."""
    now = next((step for step in steps if not step.found.agrees), None)
    if now is None:
        return []
    wrong = [quantity for quantity in now.found.quantities if quantity.beyond and quantity.name != c.PASSED_BACK]
    quantity, run = min(wrong, key=lambda quantity: ORDER.index(quantity.name)), checker.run
    from_loss = quantity.name == c.GRADIENTS
    first = max(quantity.beyond, key=lambda d: d.layer) if from_loss else quantity.beyond[0]
    place = "" if first.layer == c.NO_LAYER else f" in {run.place(first.layer)}"
    found = (
        f"step {now.number}, {quantity.name}: {len(quantity.beyond)} of {quantity.compared} differ, "
        f"first{' from the loss back' if from_loss else ''}{place} "
        f"({first.where}, relative difference {first.relative:.1e})"
    )
    hint = _hint(quantity.name, first, now, run)
    return [found, f"step {now.number}: {hint}"] if hint else [found]


def _hint(name: str, first: Difference, now: ComparedStep, run: VerifiedRun) -> str:
    if name in (c.OUTPUTS, c.AGAIN):
        return _of_layer(first, now, run)
    if name == c.BUFFERS and now.plain is not None:
        if any(layer == first.layer and first.where.startswith(f"{norm}.") for layer, norm in now.plain.counted):
            return "outputs agree: only the moving averages of BatchNorm differ, which an evaluation uses"
        return f"{run.place(first.layer)} changes a buffer of its own in forward, and again in recompute"
    return HINTS.get(name, "")


def _of_layer(first: Difference, now: ComparedStep, run: VerifiedRun) -> str:
    """Returns what may be wrong with a layer that has the right weights, random numbers and mode."""
    assert now.plain is not None
    place = run.place(first.layer)
    changing = "something that changes between two calls, such as random numbers that are not torch's"
    if first.layer in {layer for layer, _ in now.plain.counted}:
        changing += ", or its BatchNorm normalises by other statistics than its micro-batch's"
    again = next((d.point for d in now.found[c.AGAIN].beyond if d.layer == first.layer), None)
    if again is not None and _given_another(again, now.ours):
        return f"{place} was given another input in recompute than in forward"
    if again is not None:
        return f"{place} gives something else when it is computed again: it depends on {changing}"
    if first.layer == 0:
        return f"{place} is the first: the data source must give the same mini-batches whenever it is read"
    return f"the layers before {place} agree: it depends on {changing}, or was given another input"


def _given_another(at: Point, ours: RecordedStep) -> bool:
    given, again = ours.trace.get(INPUT, {}), ours.trace.get(INPUT_AGAIN, {})
    return any(mark != given.get(point) for point, mark in again.items() if point[:3] == at[:3])


def batchnorm_note(
    micro_batches: Sequence[Sequence[MicroBatch]],
    ours: RecordedStep,
    plain: PlainStep,
    whole: PlainStep,
    tolerance: float,
    names: Sequence[str],
) -> dict[str, Any]:
    """Describes the difference that M makes by BatchNorm, by three records of one step.

    Args:
        micro_batches: of the mini-batch, by replica.
        ours, plain, whole: of the pipeline, of the plain loop, of the plain loop with BatchNorm over the whole
            mini-batch.

    Returns:
        ``layers``: BatchNorm layers; ``micro_batch``, ``mini_batch``: examples in each; ``loss``, ``whole_loss``: of
        the two plain loops; ``loss_differs``: the relative difference of these; ``first_layer``: the first whose output
        differs between them, None: none; ``explains``: the pipeline differs from the plain loop over micro-batches, and
        agrees with the other one; ``text``: all of this as sentences.
    """
    pipelined, apart, together = (record.get(OUTPUT, {}) for record in (ours.trace, plain.seen.trace, whole.seen.trace))

    def outputs(left: Marks, right: Marks) -> Quantity:
        return traces(c.OUTPUTS, left, right, names, tolerance)

    sizes = [len(inputs[0]) for replica in micro_batches for inputs, _ in replica]
    divided = outputs(apart, together).beyond
    note = {
        "layers": len(plain.counted),
        "micro_batch": max(sizes),
        "mini_batch": sum(sizes),
        "loss": plain.loss,
        "whole_loss": whole.loss,
        "loss_differs": abs(plain.loss - whole.loss) / abs(whole.loss) if whole.loss else 0.0,
        "first_layer": names[divided[0].layer] if divided else None,
        "explains": bool(outputs(pipelined, apart).beyond) and not outputs(pipelined, together).beyond,
    }
    return {**note, "text": _text(note)}


def _text(note: Mapping[str, Any]) -> str:
    over = f"{note['layers']} BatchNorm layers normalise over {note['micro_batch']} examples"
    if note["first_layer"] is None:
        return f"{over}, and over all {note['mini_batch']} of the mini-batch nothing would be different"
    with_all = (
        f"{over}: with M=1, over all {note['mini_batch']}, the loss of step 1 would be {note['whole_loss']:.6g} "
        f"instead of {note['loss']:.6g} (all else equal), and the output of {note['first_layer']} the first to differ"
    )
    if note["explains"]:
        return f"{with_all}. The pipeline agrees with that: its BatchNorm normalises over the whole mini-batch"
    return f"{with_all}. That is BatchNorm's doing (paper, section 2.2), and no error"
