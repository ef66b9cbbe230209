"""Scales the loss, so that small gradients do not become 0 in float16: as much as fits, found while the run trains.

The scale is a power of two, so that scaling and dividing change no bit of a gradient that fits. It belongs to the
progress of the run: the same on every worker, for every K, and after a resume.
"""

from __future__ import annotations

import math

from ..metrics.records import Progress
from ..metrics.step_report import StepReport

LARGEST = 2.0**24
GROWS_AFTER = 2000  # steps without overflow, as in torch's GradScaler


def begin(progress: Progress, configured: float | None) -> None:
    """Sets the scale of a new run; a resumed run keeps its own, unless `precision.loss_scale` is null now."""
    if configured is None:
        progress.loss_scale = None
    elif progress.loss_scale is None:
        progress.loss_scale, progress.steps_since_overflow = float(configured), 0


def adjust(progress: Progress, report: StepReport) -> bool:
    """Halves the scale after an overflow, doubles it after `GROWS_AFTER` finite steps.

    Returns:
        Whether it was an overflow: the loss is finite, its scaled gradients are not, and a smaller scale may help.
    """
    scale = progress.loss_scale or 1.0
    overflowed = scale > 1 and math.isfinite(report.loss) and not math.isfinite(report.gradient_norm)
    if overflowed:
        progress.loss_scale, progress.steps_since_overflow = scale / 2, 0
    elif progress.loss_scale is not None and report.finite:
        progress.steps_since_overflow += 1
        if progress.steps_since_overflow == GROWS_AFTER:
            progress.loss_scale, progress.steps_since_overflow = min(LARGEST, progress.loss_scale * 2), 0
    return overflowed
