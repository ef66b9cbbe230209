"""Computes cross-entropy with label smoothing and logit clipping, in two buffers of the logits' size instead of five.

For a token with target y out of V, with clipped logits c and smoothing ε:

    loss = −Σ_v q_v log softmax(c)_v,   q_v = ε/V + (1−ε)·[v = y]
         = logsumexp(c) − (1−ε)·c_y − ε·mean(c)

The gradient is softmax(c) − q, and zero where a logit was clipped (paper, section 5: a hard clip).
"""

from typing import Any

import torch
from torch import Tensor


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, clip: float | None = None, ignore: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the loss over all targets except `ignore`.

    Args:
        logits: [n, V]; half precision is widened to float32 for the loss.
        targets: int64 [n].
        smoothing: ε, spread evenly over all V classes.
        clip: logits are clipped to [−clip, clip]; None: no clipping.
        ignore: a target that is left out, such as padding.

    Returns:
        (scalar loss, float64 [2]: clipped logits and all logits of the targets that count).
    """
    loss: Tensor
    loss, clipped, counted = _SmoothedCrossEntropy.apply(logits, targets, smoothing, clip, ignore)
    return loss, torch.stack((clipped.double(), counted.double() * logits.shape[-1]))


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Returns (loss, number of clipped logits, number of targets that count).

    Saves the logits and one number per row for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, clip: float | None, ignore: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the loss; the arguments are those of `smoothed_cross_entropy`."""
        counts = torch.ones_like(targets, dtype=torch.bool) if ignore is None else targets != ignore
        targets = targets.where(counts, 0)[:, None]
        scores, is_clipped = _clip(widened(logits), clip)
        of_target = scores.gather(1, targets)[:, 0]
        normalizer = scores.logsumexp(1)
        ctx.save_for_backward(logits, targets, normalizer, counts)
        ctx.smoothing, ctx.clip = smoothing, clip
        losses = normalizer - (1 - smoothing) * of_target - smoothing * scores.mean(1)
        clipped = counts.new_zeros((), dtype=torch.int64) if is_clipped is None else (is_clipped.sum(1) * counts).sum()
        number = counts.sum()
        ctx.mark_non_differentiable(clipped, number)
        return losses.where(counts, 0.0).sum(), clipped, number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the logits, softmax(c) − q times that of the loss; None for the other arguments."""
        logits, targets, normalizer, counts = ctx.saved_tensors
        scores, is_clipped = _clip(widened(logits), ctx.clip)
        slope = (scores - normalizer[:, None]).exp_().sub_(ctx.smoothing / logits.shape[1])
        slope.scatter_add_(1, targets, torch.full_like(normalizer, ctx.smoothing - 1)[:, None])
        slope.mul_((gradients[0] * counts)[:, None])
        if is_clipped is not None:
            slope.masked_fill_(is_clipped, 0.0)
        return slope.to(logits.dtype), None, None, None, None


def widened(logits: Tensor) -> Tensor:
    """Returns half-precision logits in float32, others as they are."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _clip(scores: Tensor, clip: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns (clipped scores, mask of the clipped ones or None if there are none)."""
    if clip is None:
        return scores, None
    if scores.is_cpu and scores.numel():  # a GPU would be waited for
        low, high = scores.aminmax()
        if -clip <= float(low) and float(high) <= clip:
            return scores, None
    clipped = scores.clamp(-clip, clip)
    return clipped, clipped != scores
