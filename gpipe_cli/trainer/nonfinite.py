"""Explains a step that is not finite: runs it again and names the layer that first gave such a value."""

from __future__ import annotations

from typing import Any

from ..distributed.pipeline import MiniBatch, Pipeline
from ..errors import PlainError
from ..metrics.step_report import StepReport
from ..pipeline.finite import BACKWARD, DATA, FiniteWatch, Origin, not_finite
from .update import Updater


class NonFinite(PlainError):
    """Raised when too many updates in a row were skipped because loss or gradients were not finite."""


def find_cause(report: StepReport, pipeline: Pipeline, updater: Updater, mini_batch: MiniBatch) -> dict[str, Any]:
    """Runs a step that was not finite again, watched; every worker calls it at the same time, before the next step.

    The weights must be those of the step. Gradients and statistics of the second run are thrown away.

    Returns:
        Values for metrics.jsonl: "text" says why; the others, of the first such value, are only there if there was one.
    """
    world = pipeline.world
    watch = FiniteWatch(world.replica, pipeline.where)
    pipeline.train_step(mini_batch, watch)
    sums_finite = not_finite(updater.squared_norms()) is None
    updater.forget_step()
    found = world.all_gather((watch.first, sums_finite))
    origins = [Origin(*origin) for origin, _ in found if origin is not None]
    first = min(origins, key=lambda origin: origin.order, default=None)
    if first is not None:
        why = _explain(first, world.replicas)
    elif all(finite for _, finite in found):
        why = (
            "but all was finite when the step ran again: a layer's values do not follow from its inputs, its weights "
            "and torch's random numbers alone"
        )
    else:
        why = "the gradient of each micro-batch is finite, but their sum is not"
    text = f"the loss is {report.loss:.4g}, the norm of its gradient {report.gradient_norm:.4g}; {why}"
    if first is None:
        return {"text": text}
    values = {name: value for name, value in first._asdict().items() if name not in ("way", "place")}
    return {"text": text, "pass": "backward" if first.way == BACKWARD else "forward", **values}


def _explain(origin: Origin, replicas: int) -> str:
    if origin.layer is not None:
        place = f"layer {origin.layer!r} of cell {origin.cell}"
    else:
        place = "the data" if origin.place == DATA else "the task's loss"
    back = origin.way == BACKWARD
    begin = f"outputs and losses are finite, it began in the backward of {place}" if back else f"it began in {place}"
    replica = f" of replica {origin.replica}" if replicas > 1 else ""
    value = {"nan": "NaN", "inf": "infinite"}[origin.value]
    weight = "" if origin.weight is None else f" (its weight {origin.weight} was not finite before the step)"
    return f"{begin}, micro-batch {origin.micro_batch}{replica}: its {origin.what} is {value}{weight}"
