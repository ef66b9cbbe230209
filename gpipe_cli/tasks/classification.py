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

    Targets may be shares of the classes, floats [b, classes], as of mixed images; the largest is then the label.

    Args:
        label_smoothing: ε, spread evenly over the classes; training only.
    """

    statistics = ("accuracy", "examples")
    metrics = ("nll", "accuracy", "top5_accuracy")
    predicts = True

    def __init__(self, label_smoothing: ShareOrZero = 0.1) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (smoothed cross-entropy summed over the examples, [correct examples, examples])."""
        logits, labels = outputs[0], _labels(targets)
        if targets[0].is_floating_point():
            smoothing = self.label_smoothing
            loss = F.cross_entropy(widened(logits), targets[0], reduction="sum", label_smoothing=smoothing)
        else:
            loss, _ = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        right = (logits.detach().argmax(1) == labels).sum().double()
        return loss, torch.stack((right, torch.full_like(right, len(labels))))

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns [negative log-likelihood without smoothing, examples correct in the top 1, in the top 5]."""
        logits, labels = outputs[0], _labels(targets)
        wide = widened(logits)
        nll = F.cross_entropy(wide, labels, reduction="none").double().sum()
        best = wide.topk(min(5, wide.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        return torch.stack((nll, hits[:, 0].sum().double(), hits.sum().double()))

    def predictions(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns [label, most probable class, its probability] of each example, float64 [b, 3]."""
        best = widened(outputs[0]).softmax(1).max(1)
        return torch.stack((_labels(targets).double(), best.indices.double(), best.values.double()), dim=1)


def _labels(targets: Tensors) -> Tensor:
    """Returns the label of each example, int64 [b]."""
    return targets[0].argmax(1) if targets[0].is_floating_point() else targets[0]
