"""BatchNorm is the one layer that sees how the mini-batch was divided: what that makes of a comparison with M = 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..micro_batch import MicroBatch
from .compare import GRADIENTS, LOSS, OUTPUTS, compare
from .record import StepState


@dataclass(frozen=True)
class BatchNormNote:
    """The first step with BatchNorm over each micro-batch, beside the same with BatchNorm over the whole mini-batch.

    Attributes:
        layers: BatchNorm layers. micro_batch, mini_batch: examples that they normalise over.
        loss, whole_loss: of the plain loop, either way.
        loss_differs, gradients_differ: largest relative differences between the two.
        first_layer: the first, in forward, whose output is not the same.
        explains: the pipeline differs from the plain loop over micro-batches, and agrees with the other.
    """

    layers: int
    micro_batch: int
    mini_batch: int
    loss: float
    whole_loss: float
    loss_differs: float
    gradients_differ: float
    first_layer: str | None
    explains: bool

    @property
    def text(self) -> str:
        """For the person."""
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

    def as_json(self) -> dict[str, Any]:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in vars(self).items()}
        return {**finite, "text": self.text}


def batchnorm_note(
    layers: int,
    micro_batches: Sequence[Sequence[MicroBatch]],
    sides: tuple[StepState, StepState, StepState],
    tolerance: float,
    names: Sequence[str],
) -> BatchNormNote:
    """From one step.

    Args:
        layers: BatchNorm layers of the model.
        micro_batches: the mini-batch.
        sides: of the pipeline, of the plain loop, of the plain loop with BatchNorm over the whole mini-batch.
    """
    ours, plain, whole = sides
    sizes = [len(inputs[0]) for replica in micro_batches for inputs, _ in replica]
    divided = compare(plain, whole, StepState(), tolerance, names)
    losses, gradients, outputs = divided[LOSS].worst, divided[GRADIENTS].worst, divided[OUTPUTS].beyond
    as_whole = compare(ours, whole, StepState(), tolerance, names)
    as_plain = compare(ours, plain, StepState(), tolerance, names)
    return BatchNormNote(
        layers=layers,
        micro_batch=max(sizes),
        mini_batch=sum(sizes),
        loss=plain.loss,
        whole_loss=whole.loss,
        loss_differs=losses.relative if losses else 0.0,
        gradients_differ=gradients.relative if gradients else 0.0,
        first_layer=names[outputs[0].layer] if outputs else None,
        explains=bool(as_plain[OUTPUTS].beyond) and not as_whole[OUTPUTS].beyond,
    )
