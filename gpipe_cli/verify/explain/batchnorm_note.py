"""Describes the difference that M makes by BatchNorm: over micro-batches, and over the mini-batch as with M = 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...micro_batch import MicroBatch
from ..compare import OUTPUTS, Marks, Quantity, traces
from ..plain import PlainStep
from ..record import OUTPUT, RecordedStep


@dataclass(frozen=True)
class BatchNormNote:
    """Describes the first step with BatchNorm over each micro-batch beside the same over the whole mini-batch.

    Attributes:
        layers: BatchNorm layers.
        micro_batch, mini_batch: the number of examples in each.
        loss, whole_loss: of the plain loop, over micro-batches and over the mini-batch.
        loss_differs: relative difference between the two.
        first_layer: the first, in forward, whose output differs; None: none.
        explains: the pipeline differs from the plain loop over micro-batches, and agrees with the other one.
    """

    layers: int
    micro_batch: int
    mini_batch: int
    loss: float
    whole_loss: float
    loss_differs: float
    first_layer: str | None
    explains: bool

    @property
    def text(self) -> str:
        """Returns the note as sentences."""
        over = f"{self.layers} BatchNorm layers normalise over {self.micro_batch} examples"
        if self.first_layer is None:
            return f"{over}, and over all {self.mini_batch} of the mini-batch nothing would be different"
        with_all = (
            f"{over}: with M=1, over all {self.mini_batch}, the loss of step 1 would be {self.whole_loss:.6g} instead "
            f"of {self.loss:.6g} (all else equal), and the output of {self.first_layer} the first to differ"
        )
        if self.explains:
            return f"{with_all}. The pipeline agrees with that: its BatchNorm normalises over the whole mini-batch"
        return f"{with_all}. That is BatchNorm's doing (paper, section 2.2), and no error"


def batchnorm_note(
    micro_batches: Sequence[Sequence[MicroBatch]],
    ours: RecordedStep,
    plain: PlainStep,
    whole: PlainStep,
    tolerance: float,
    names: Sequence[str],
) -> BatchNormNote:
    """Compares three records of one step.

    Args:
        micro_batches: of the mini-batch, by replica.
        ours, plain, whole: of the pipeline, of the plain loop, of the plain loop with BatchNorm over the whole
            mini-batch.
    """
    sizes = [len(inputs[0]) for replica in micro_batches for inputs, _ in replica]
    pipelined, apart, together = (record.get(OUTPUT, {}) for record in (ours.trace, plain.seen.trace, whole.seen.trace))

    def outputs(left: Marks, right: Marks) -> Quantity:
        return traces(OUTPUTS, left, right, names, tolerance)

    divided = outputs(apart, together).beyond
    return BatchNormNote(
        layers=len(plain.counted),
        micro_batch=max(sizes),
        mini_batch=sum(sizes),
        loss=plain.loss,
        whole_loss=whole.loss,
        loss_differs=abs(plain.loss - whole.loss) / abs(whole.loss) if whole.loss else 0.0,
        first_layer=names[divided[0].layer] if divided else None,
        explains=bool(outputs(pipelined, apart).beyond) and not outputs(pipelined, together).beyond,
    )
