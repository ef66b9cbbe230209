"""Defines the task of classification: one label for each example (paper, section 4: ImageNet)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..micro_batch import Tensors
from ..typed_section import ShareOrZero
from .base import Task
from .cross_entropy import smoothed_cross_entropy, widened


class ClassificationTask(Task):
    """Computes the loss and accuracy of outputs (logits [b, classes], …) for targets (labels int64 [b], …).

    Args:
        label_smoothing: ε, spread evenly over the classes; training only.
    """

    statistics = ("accuracy", "examples")
    metrics = ("nll", "accuracy", "top5_accuracy")

    def __init__(self, label_smoothing: ShareOrZero = 0.1) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (smoothed cross-entropy summed over the examples, [correct examples, examples])."""
        logits, labels = outputs[0], targets[0]
        loss, _ = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        right = (logits.detach().argmax(1) == labels).sum().double()
        return loss, torch.stack((right, torch.full_like(right, len(labels))))

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns [negative log-likelihood without smoothing, examples correct in the top 1, in the top 5]."""
        logits, labels = outputs[0], targets[0]
        wide = widened(logits)
        nll = F.cross_entropy(wide, labels, reduction="none").double().sum()
        best = wide.topk(min(5, wide.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        return torch.stack((nll, hits[:, 0].sum().double(), hits.sum().double()))
