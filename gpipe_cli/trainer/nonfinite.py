"""Handles a step that is not finite: adjusts the loss scale of float16, or finds the layer where it began.

The loss is scaled so that small gradients do not become 0 in float16: as much as fits, found while the run trains. The
scale is a power of two, so that scaling and dividing change no bit of a gradient that fits. It belongs to the progress
of the run: the same on every worker, for every K, and after a resume.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from ..distributed.pipeline import WorkerPipeline
from ..errors import PlainError
from ..metrics.records import Progress
from ..pipeline.messages.boundary import as_tensors
from ..pipeline.step import StepResult

LARGEST = 2.0**24  # of the loss scale
GROWS_AFTER = 2000  # steps without overflow, as in torch's GradScaler


class NonFinite(PlainError):
    """Raised when too many updates in a row were skipped because loss or gradients were not finite."""


def begin_scale(progress: Progress, configured: float | None) -> None:
    """Sets the scale of a new run; a resumed run keeps its own, unless `precision.loss_scale` is null now."""
    if configured is None:
        progress.loss_scale = None
    elif progress.loss_scale is None:
        progress.loss_scale, progress.steps_since_overflow = float(configured), 0


def adjust_scale(progress: Progress, result: StepResult) -> None:
    """Halves the scale after an overflow, doubles it after `GROWS_AFTER` finite steps."""
    if result.overflowed:
        progress.loss_scale, progress.steps_since_overflow = result.plan.loss_scale / 2, 0
    elif progress.loss_scale is not None and result.finite:
        progress.steps_since_overflow += 1
        if progress.steps_since_overflow == GROWS_AFTER:
            progress.loss_scale, progress.steps_since_overflow = min(LARGEST, progress.loss_scale * 2), 0


def find_cause(result: StepResult, pipeline: WorkerPipeline) -> str:
    """Runs a step that was not finite again, and returns in words where it began.

    Every worker calls it before the next step, with the weights of the step unchanged. A step draws the same random
    numbers whenever it runs. Its gradients are added up once more, and the caller throws them away.
    """
    found: list[tuple[int, int, int, str]] = []
    engine, world = pipeline.engine, pipeline.world

    def look(layer: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        is_right = [(tensor.isfinite() | (tensor == -math.inf)).all() for tensor in as_tensors(outputs)]
        if not all(map(bool, is_right)):  # -inf may be a mask
            found.append((engine.running.micro_batch, world.replica, engine.running.cell, layer))

    with ExitStack() as hooks:
        for layer in pipeline.layers:
            hooks.callback(layer.module.register_forward_hook(partial(look, layer.name)).remove)
        pipeline.train_step(result.plan, timed=False)
    everyone = sorted((place for places in world.all_gather(found) for place in places), key=lambda place: place[:3])
    symptom = f"the loss is {result.loss:.4g}, the norm of its gradient {result.gradient_norm:.4g}"
    if everyone:
        micro_batch, replica, cell, layer = everyone[0]
        of_replica = f" of replica {replica}" if world.replicas > 1 else ""
        return f"{symptom}; it began in layer {layer!r} of cell {cell}, micro-batch {micro_batch}{of_replica}"
    losses = [(number, loss) for row in result.losses for number, loss in enumerate(row)]
    bad = next((number for number, loss in losses if not math.isfinite(loss)), None)
    if bad is not None:
        return f"{symptom}; it began in the task's loss (cell {pipeline.engine.last}), micro-batch {bad}"
    return f"{symptom}; all layers' outputs and losses are finite, so it began in a backward"
