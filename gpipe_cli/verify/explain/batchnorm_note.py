"""Describes the difference that M makes by BatchNorm: over micro-batches, and over the mini-batch as with M = 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...micro_batch import MicroBatch
from ..compare import OUTPUTS, Marks, Quantity, traces
from ..plain import PlainStep
from ..record import OUTPUT, RecordedStep


def batchnorm_note(
    micro_batches: Sequence[Sequence[MicroBatch]],
    ours: RecordedStep,
    plain: PlainStep,
    whole: PlainStep,
    tolerance: float,
    names: Sequence[str],
) -> dict[str, Any]:
    """Compares three records of one step.

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
        return traces(OUTPUTS, left, right, names, tolerance)

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
