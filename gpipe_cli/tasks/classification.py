"""Classification: one label an example (paper, section 4: ImageNet)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..micro_batch import Tensors
from .cross_entropy import smoothed_cross_entropy
from .limits import check_label_smoothing


class ClassificationTask:
    """Outputs: (logits [b, classes], …); targets: (labels int64 [b], …).

    Args:
        label_smoothing: ε, spread evenly over the classes; training only.

    Raises:
        ValueError: a value outside its limits; the message names the key.
    """

    unit = "examples"
    statistics: tuple[str, ...] = ("accuracy", "examples")
    metrics: tuple[str, ...] = ("nll", "top1", "top5")

    def __init__(self, label_smoothing: float = 0.1) -> None:
        check_label_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing

    def weight(self, targets: Tensors) -> float:
        """The number of examples."""
        return float(len(targets[0]))

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """(sum over examples of the smoothed cross-entropy, [examples right first, examples])."""
        logits, labels = outputs[0], targets[0]
        loss, _ = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        right = (logits.detach().argmax(1) == labels).sum().double()
        return loss, torch.stack((right, torch.full_like(right, len(labels))))

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """[negative log-likelihood without smoothing, examples right first, examples right among the first five]."""
        logits, labels = outputs[0], targets[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        nll = F.cross_entropy(wide, labels, reduction="none").double().sum()
        best = wide.topk(min(5, wide.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        return torch.stack((nll, hits[:, 0].sum().double(), hits.sum().double()))

    def predictions(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """For the pictures of an evaluation: [b, 3], each row (class, predicted class, its probability)."""
        confidence, predicted = outputs[0].float().softmax(1).max(1)
        return torch.stack((targets[0].float(), predicted.float(), confidence), dim=1)

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Per example: `nll` in nats, `accuracy` (top 1) and `top5_accuracy`."""
        return {
            "nll": sums["nll"] / weight,
            "accuracy": sums["top1"] / weight,
            "top5_accuracy": sums["top5"] / weight,
        }
