"""Defines the task of language models: the next token of a text (paper, section 3: Transformer-L)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..micro_batch import Tensors
from ..typed_section import Positive, ShareOrZero
from .base import Task
from .cross_entropy import smoothed_cross_entropy, widened

LARGEST = 709  # the largest whole number whose exponential is a finite float


class LanguageModelTask(Task):
    """Computes loss and metrics of outputs (logits [b, t, V],) for targets (next ids [b, t],). Padding is left out.

    Args:
        label_smoothing: ε, spread evenly over the vocabulary; training only.
        logit_clip: logits are clipped hard to [−logit_clip, logit_clip], with no gradient outside; training only;
            None: no clipping. The paper (section 5) clips but does not give the value.
        pad_id: the id of padding; None if there is none.
    """

    unit = "tokens"
    metrics = ("nll", "correct")

    def __init__(
        self, label_smoothing: ShareOrZero = 0.0, logit_clip: Positive | None = None, pad_id: int | None = None
    ) -> None:
        self.label_smoothing, self.logit_clip, self.pad_id = label_smoothing, logit_clip, pad_id
        self.statistics = () if logit_clip is None else ("clipped_logits_share", "logits")

    def weight(self, targets: Tensors) -> float:
        """Returns the number of targets that are not padding."""
        return float(targets[0].numel() if self.pad_id is None else (targets[0] != self.pad_id).sum())

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (smoothed cross-entropy of the clipped logits, a sum; [clipped logits, all logits])."""
        logits, wanted = _rows(outputs[0], targets[0])
        loss, clipped = smoothed_cross_entropy(logits, wanted, self.label_smoothing, self.logit_clip, self.pad_id)
        return loss, clipped[: len(self.statistics)]

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns [negative log-likelihood, correct tokens], neither smoothed nor clipped."""
        logits, wanted = _rows(outputs[0], targets[0])
        counts = torch.ones_like(wanted, dtype=torch.bool) if self.pad_id is None else wanted != self.pad_id
        nll = F.cross_entropy(widened(logits), wanted.where(counts, 0), reduction="none")
        correct = (logits.argmax(1) == wanted) & counts
        return torch.stack((nll.double().where(counts, 0.0).sum(), correct.sum().double()))

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns means over the tokens: `nll` in nats, `accuracy`, and the perplexity e^nll."""
        nll = sums["nll"] / weight
        perplexity = math.exp(nll) if nll < LARGEST else math.inf
        return {"nll": nll, "accuracy": sums["correct"] / weight, "perplexity": perplexity}


def _rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits [b, t, V] as [b·t, V], and targets [b, t] as [b·t]."""
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
