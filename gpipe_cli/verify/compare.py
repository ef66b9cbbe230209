"""Says which quantities differ between two ways to run a training step, where, and what a user can do about it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..comparison.difference import NO_LAYER, Gap, Key, Quantity, judge_tensors
from ..config import Settings
from ..metrics.metrics_file import json_safe
from ..typed_section import shown

LOSS, LOSSES = "loss", "losses of micro-batches"
OUTPUTS, AGAIN = "outputs of layers", "outputs recomputed"
GRADIENTS, NORM = "gradients", "gradient norm"
BUFFERS, STATE, UPDATED = "BatchNorm and other buffers", "optimizer state", "weights after"

ORDER = (OUTPUTS, AGAIN, LOSSES, LOSS, GRADIENTS, NORM, BUFFERS, STATE, UPDATED)  # a difference spreads to the right
OF_LOSSES = (
    "the outputs of all layers agree: the loss, of the task or of a layer, depends on more than outputs and targets, "
    "or was given other targets"
)

Found = Mapping[str, Quantity]  # of one step, by name
Gaps = dict[Key, Gap]


def agrees(found: Found) -> bool:
    """Returns whether all results agree."""
    return not any(quantity.beyond for quantity in found.values())


def judged(name: str, gaps: Gaps, tolerance: float) -> Quantity:
    """Judges the gaps of one quantity, in layer order. Outputs are judged together with those of their layer."""
    found = sorted(gaps.items(), key=lambda gap: gap[0])
    if name in (OUTPUTS, AGAIN):
        return judge_tensors(name, found, tolerance, kind=lambda key: key[0])
    return judge_tensors(name, found, tolerance, changes=name in (BUFFERS, UPDATED))


# -- what a user reads -------------------------------------------------------------------------------------------------


def findings(steps: Mapping[int, Found], places: Sequence[str], batchnorms: Collection[int]) -> list[str]:
    """Returns sentences on the first difference and what a user can do about it; none if no step differs.

    Args:
        steps: number of a step -> what was compared.
        places: place of each layer, as ``layer conv (cell 0)``.
        batchnorms: indices of layers that have a BatchNorm.
    """
    number = next((number for number, found in steps.items() if not agrees(found)), None)
    if number is None:
        return []
    now = steps[number]
    name = min((name for name, q in now.items() if q.beyond), key=ORDER.index)
    quantity, from_loss = now[name], name == GRADIENTS
    first = max(quantity.beyond, key=lambda d: d.layer) if from_loss else quantity.beyond[0]
    place = "" if first.layer == NO_LAYER else places[first.layer]
    found = (
        f"step {number}, {name}: {len(quantity.beyond)} of {quantity.compared} differ, "
        f"first{' from the loss back' if from_loss else ''}{place and f' in {place}'} "
        f"({first.where}, relative difference {first.relative:.1e})"
    )
    hint = OF_LOSSES if name == LOSSES else ""
    if name in (OUTPUTS, AGAIN):
        repeated = now[AGAIN].beyond if AGAIN in now else []
        again = any(difference.layer == first.layer for difference in repeated)
        hint = _of_layer(first.layer, place, again, first.layer in batchnorms)
    return [found, f"step {number}: {hint}"] if hint else [found]


def _of_layer(layer: int, place: str, again: bool, batchnorm: bool) -> str:
    """Returns a sentence on the possible faults of the first layer whose outputs differ.

    Args:
        again: True if its recompute differs from its first forward.
        batchnorm: True if it has a BatchNorm.
    """
    changing = "something that changes between two calls, such as random numbers that are not torch's"
    if batchnorm:
        changing += ", or its BatchNorm normalises by other statistics than its micro-batch's"
    if again:
        return f"{place} gives something else when it is computed again: it depends on {changing}"
    if layer == 0:
        return f"{place} is the first: the data source must give the same mini-batches whenever it is read"
    return f"the layers before {place} agree: it depends on {changing}, or was given another input"


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(
    settings: Settings, tolerance: float, steps: Mapping[int, Found], found: list[str], notes: list[str], loss: float
) -> dict[str, Any]:
    """Returns the report of a run as plain values; numbers that are not finite become null.

    Args:
        settings: configuration of the run.
        tolerance: largest relative difference that counted as rounding.
        steps: number of a step -> what was compared.
        found: sentences on what is wrong (`findings`).
        notes: sentences on what looks wrong and is no error.
        loss: loss of the last step.
    """
    plain = {
        "agrees": bool(steps) and all(map(agrees, steps.values())),
        "verdict": verdict(settings, tolerance, steps),
        "findings": found,
        "notes": notes,
        "steps": [
            {"step": number, "quantities": [_quantity(quantity) for quantity in step.values()]}
            for number, step in steps.items()
        ],
        "format": settings.verify.format,
        "loss": loss,
    }
    return dict(json_safe(plain))


def _quantity(quantity: Quantity) -> dict[str, Any]:
    """Returns the plain values of one quantity, and of its largest difference."""
    own = {"name": quantity.name, "verdict": quantity.verdict, "compared": quantity.compared}
    worst = {name: getattr(quantity.worst, name, None) for name in ("absolute", "relative", "where")}
    return {**own, "beyond": len(quantity.beyond), **worst}


def verdict(settings: Settings, tolerance: float, steps: Mapping[int, Found]) -> str:
    """Returns the verdict on a run in one line; the arguments are those of `report_of`."""
    run = _in_words(settings, len(steps))
    if not steps:
        return f"nothing was compared: the data ended before the first step ({run})"
    if not all(map(agrees, steps.values())):
        wider = "" if settings.verify.dtype == "float64" else "; verify.dtype=float64 tells errors from rounding"
        return f"DIFFERENT: the pipelined run is not the plain one ({run}){wider}"
    largest = max((quantity for found in steps.values() for quantity in found.values()), key=lambda q: q.relative)
    if largest.worst is None or largest.verdict == "bit for bit":
        return f"OK, bit for bit: the pipelined run is the plain one ({run})"
    worst = largest.worst
    return (
        f"OK: the pipelined run is the plain one but for rounding; largest relative difference {worst.relative:.1e} "
        f"(absolute {worst.absolute:.1e}) in {largest.name}, {worst.where}; tolerance {tolerance:g} ({run})"
    )


def _in_words(settings: Settings, steps: int) -> str:
    """Returns number of steps and the pipeline of a run, for its verdict."""
    pipeline = settings.pipeline
    wide = " in float64" if settings.verify.dtype == "float64" else ""
    replicas = f", {pipeline.replicas} replicas" if pipeline.replicas > 1 else ""
    kept = f"remat {pipeline.remat}" if pipeline.keep is None else f"keep {shown(pipeline.keep)}"
    return (
        f"{steps} step{'s' if steps != 1 else ''}{wide}, K={pipeline.K}, M={pipeline.M}, {pipeline.worker_count} "
        f"worker{'s' if pipeline.worker_count != 1 else ''}{replicas}, {pipeline.schedule}, {kept}"
    )
