"""The prediction of tokens, which translation and language models share: loss and metrics over non-padding targets."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..micro_batch import Tensors
from .cross_entropy import smoothed_cross_entropy
from .limits import check_label_smoothing


class TokenPrediction:
    """Outputs: (logits [b, t, V],); targets: (ids [b, t],), with padding that counts nowhere.

    Args:
        label_smoothing: ε, spread evenly over the vocabulary; training only.
        logit_clip: logits are clipped hard to [−logit_clip, logit_clip], with no gradient outside; training only;
            None: not at all. The paper (section 5) clips, and does not say where.
        pad_id: the target that is padding; None where there is none.

    Raises:
        ValueError: a value outside its limits; the message names the key.
    """

    unit = "tokens"
    metrics: tuple[str, ...] = ("nll", "correct")

    def __init__(self, label_smoothing: float, logit_clip: float | None, pad_id: int | None) -> None:
        check_label_smoothing(label_smoothing)
        if logit_clip is not None and not logit_clip > 0:
            raise ValueError(f"task.logit_clip={logit_clip}: use a positive number such as 25, or null for no clipping")
        self.label_smoothing, self.logit_clip, self.pad_id = label_smoothing, logit_clip, pad_id
        self.statistics: tuple[str, ...] = () if logit_clip is None else ("clipped_logits_share", "logits")

    def weight(self, targets: Tensors) -> float:
        """The number of targets that are no padding."""
        return float(targets[0].numel() if self.pad_id is None else (targets[0] != self.pad_id).sum())

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """(sum over targets of the smoothed cross-entropy of the clipped logits, clipped logits and logits)."""
        logits, wanted = _rows(outputs[0], targets[0])
        loss, clipped = smoothed_cross_entropy(logits, wanted, self.label_smoothing, self.logit_clip, self.pad_id)
        return loss, clipped[: len(self.statistics)]

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """[negative log-likelihood, correct tokens]: neither smoothed nor clipped."""
        logits, wanted = _rows(outputs[0], targets[0])
        counts = torch.ones_like(wanted, dtype=torch.bool) if self.pad_id is None else wanted != self.pad_id
        wide = logits if logits.dtype == torch.float64 else logits.float()
        nll = F.cross_entropy(wide, wanted.where(counts, 0), reduction="none")
        correct = (logits.argmax(1) == wanted) & counts
        return torch.stack((nll.double().where(counts, 0.0).sum(), correct.sum().double()))

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Per token: `nll` in nats, share of `accuracy`, `perplexity` e^nll."""
        nll = sums["nll"] / weight
        return {"nll": nll, "accuracy": sums["correct"] / weight, "perplexity": _exp(nll)}


def _rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def _exp(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
