"""Explains a difference in forward or in recompute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import compare as c
from ..check import AGAIN, Checker, ComparedStep
from ..compare import Difference, Quantity
from ..layout import VerifiedRun
from ..plain import PlainStep
from ..record import INPUT, INPUT_AGAIN, OUTPUT, WEIGHTS, WEIGHTS_AGAIN, Fingerprint, Point
from ..reference import noise_seed
from .likeness import BFLOAT16, likeness


def measured(difference: Difference) -> str:
    return f"relative difference {difference.relative:.1e}"


def explain_forward(now: ComparedStep, before: ComparedStep | None, checker: Checker) -> list[str]:
    """Returns what is wrong with the outputs of layers, as sentences; empty where nothing is."""
    run = checker.run
    absent = _absent(now, run)
    if absent:
        return absent
    causes = _used_weights(now, before, run, WEIGHTS) or _modes(now, run, False) or _noise(now, run, WEIGHTS)
    beyond = now.found[c.OUTPUTS].beyond
    if not beyond:
        return causes
    first = beyond[0]
    head = f"first in forward, the output of {run.place(first.layer)} differs ({measured(first)}, {first.where})"
    return [head, *(causes or [_of_layer(now, first, checker)])]


def _absent(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Names the micro-batches that no layer has seen."""
    assert now.plain is not None
    seen = {(point.replica, point.micro_batch) for point in now.ours.trace.get(OUTPUT, {})}
    missing = now.plain.losses.keys() - seen
    return [f"{run.micro_batches(missing)} did not run: left out by the pipeline"] if missing and seen else []


def _of_layer(now: ComparedStep, first: Difference, checker: Checker) -> str:
    """Explains a layer that has the right weights and random numbers, and is the first to put out something else."""
    assert now.plain is not None and first.point is not None
    run, place, right = checker.run, checker.run.place(first.layer), now.plain.seen.trace[OUTPUT]
    mark = now.ours.trace.get(OUTPUT, {}).get(first.point)
    if mark is None:
        return f"{place} put out nothing for {run.micro_batches([first.point[:2]])}"
    if mark.size != right[first.point].size:
        given = "it was given other data" if first.layer == 0 else "it was given, or puts out, other shapes"
        what = f"{mark.size} elements instead of {right[first.point].size} in {run.micro_batches([first.point[:2]])}"
        return f"{place}: {given}, {what}: rows were cut or added, or it is another mini-batch{_after_resume(now)}"
    like = likeness(mark, first.point, right, run)
    if first.layer == 0:
        return f"{place} is the first: it was given other data{f'; {like}' if like else ''}{_after_resume(now)}"
    if like.startswith("it is that of"):
        return f"{like}: {place} was given the input of another micro-batch"
    module: Any = checker.model.build([first.layer]).layers[0][2]
    if any(hasattr(part, "begin_step") for part in module.modules()):
        return (
            f"{place} has the right weights: its begin_step was told another step than {now.number - 1}, or not called"
        )
    if any(difference.layer == first.layer for difference in now.found[c.AGAIN].beyond):
        return _not_repeatable(first.layer, now, run)
    if any(layer == first.layer for layer, _ in now.plain.counted):
        return f"{place} has the right weights: its BatchNorm normalises by other statistics than its micro-batch's"
    if BFLOAT16[0] < first.relative < BFLOAT16[1]:
        return f"{place} has the right weights; a difference of this size is that of bfloat16: its input was rounded"
    return f"{place} used the right weights: its input or its computation differs{f'; {like}' if like else ''}"


def _after_resume(now: ComparedStep) -> str:
    return ", in the first step after a resume" if now.found[c.RESUMED].compared else ""


# -- weights and random numbers ----------------------------------------------------------------------------------------


def _used_weights(now: ComparedStep, before: ComparedStep | None, run: VerifiedRun, kind: str) -> list[str]:
    """Explains which weights the layers used, where they were not those that were held before the step."""
    used = now.ours.trace.get(kind, {})
    wrong = {d.point for d in now.found[c.USED].beyond if d.point in used}
    layers = sorted({point.layer for point in wrong if point is not None})
    wrong_marks = {point: used[point] for point in wrong if point is not None and _differs(now, point, kind)}
    if not layers or not wrong_marks:
        return []
    layers = sorted({point.layer for point in wrong_marks})
    when = "recompute" if kind == WEIGHTS_AGAIN else "forward"
    who = f"{run.cells_of(layers)} used"
    which = f"first {run.place(layers[0])}, {run.micro_batches((p.replica, p.micro_batch) for p in wrong_marks)}"
    if before is not None and before.plain is not None and _agree(wrong_marks, before.plain):
        return [f"{who} stale weights in {when}: those of the step before, without its update ({which})"]
    return [f"{who} other weights in {when} than were held before the step ({which})"]


def _differs(now: ComparedStep, point: Point, kind: str) -> bool:
    assert now.plain is not None
    mark = now.ours.trace[kind][point]
    right = now.plain.weight_used(point, mark)
    return mark.distance(right) > 1e-12 * max(right.norm, 1e-30)


def _agree(used: Mapping[Point, Fingerprint], old: PlainStep) -> bool:
    pairs = [(mark, old.weight_used(point, mark)) for point, mark in used.items()]
    return all(mark.distance(one) <= 1e-9 * max(one.norm, 1e-30) for mark, one in pairs)


def _noise(now: ComparedStep, run: VerifiedRun, kind: str) -> list[str]:
    """Explains a wrong seed of a layer's random numbers: whose seed it is, where that can be found."""
    again = kind == WEIGHTS_AGAIN
    points = [d.point for d in _in_run(now.found[c.SEEDS], again) if d.point is not None]
    wrong = sorted((point.layer, point.micro_batch, point.replica) for point in points)
    if not wrong:
        return []
    layer, m, r = wrong[0]
    whose = _owner(now.ours.seeds[kind][r, m, layer], now.number - 1, r, m, layer, run)
    layers = {layer for layer, _, _ in wrong}
    which = run.micro_batches((r, m) for other, m, r in wrong if other == layer)
    if len(layers) > 1:
        which += f"; {len(layers)} layers in {run.cells_of(layers)}"
    if again:
        text = f"recompute drew other random numbers than forward in {run.place(layer)} ({which})"
        return [f"{text}: a wrong seed for its noise{whose}"]
    return [f"{run.place(layer)} drew other random numbers in forward ({which}): a wrong seed{whose}"]


def _owner(seed: int, step: int, replica: int, micro_batch: int, layer: int, run: VerifiedRun) -> str:
    """Returns what the seed belongs to, as text; "" where that is unknown."""
    right = {"step": step, "replica": replica, "micro_batch": micro_batch, "layer": layer}
    tries = {
        "step": [*range(step + 12)],
        "replica": [*range(max(run.replicas, 2))],
        "micro_batch": [*range(2 * run.M)],
        "layer": [*range(len(run.names) + 1)],
    }
    for name, values in tries.items():
        for value in values:
            if value != right[name] and noise_seed(run.seed, **{**right, name: value}) == seed:
                shown = f"step {value + 1}" if name == "step" else f"{name.replace('_', '-')} {value}"
                if name == "layer" and value < len(run.names):
                    shown = run.place(value)
                return f", that of {shown}"
    return ""


def _modes(now: ComparedStep, run: VerifiedRun, again: bool) -> list[str]:
    """Names the first layer that ran in evaluation mode, or with another autocast than the run's."""
    wrong = _in_run(now.found[c.MODES], again)
    return [f"{run.place(wrong[0].layer)} did not run as the run says: {wrong[0].where}"] if wrong else []


def _in_run(quantity: Quantity, again: bool) -> list[Difference]:
    """Returns the differences in recompute if ``again``, else those in forward."""
    return [difference for difference in quantity.beyond if (AGAIN in difference.where) == again]


# -- recompute ---------------------------------------------------------------------------------------------------------


def explain_recompute(now: ComparedStep, before: ComparedStep | None, run: VerifiedRun) -> list[str]:
    """Returns what is wrong with a recompute, as sentences; empty where it repeats forward."""
    beyond = now.found[c.AGAIN].beyond
    causes = _used_weights(now, before, run, WEIGHTS_AGAIN) or _modes(now, run, True) or _noise(now, run, WEIGHTS_AGAIN)
    if not beyond:
        return causes
    first = beyond[0]
    causes = causes or _other_input(now, first, run)
    place = run.place(first.layer)
    head = (
        f"forward agrees, but when it is recomputed for backward, the output of {place} differs "
        f"({measured(first)}, {first.where})"
    )
    return [head, *(causes or [_not_repeatable(first.layer, now, run)])]


def _other_input(now: ComparedStep, first: Difference, run: VerifiedRun) -> list[str]:
    """Explains a recompute that began with another input than forward, at the first layer of a cell."""
    assert first.point is not None
    trace, at = now.ours.trace, first.point
    given, again = trace.get(INPUT, {}), trace.get(INPUT_AGAIN, {})
    wrong = [point for point, mark in again.items() if point[:3] == at[:3] and mark != given.get(point)]
    if not wrong:
        return []
    like = likeness(again[wrong[0]], wrong[0], given, run)
    text = f"{run.place(first.layer)} was given another input in recompute than in forward"
    return [f"{text}{f': {like}' if like else ''}"]


def _not_repeatable(layer: int, now: ComparedStep, run: VerifiedRun) -> str:
    assert now.plain is not None
    norm = "its BatchNorm normalises by other statistics, or " if layer in {of for of, _ in now.plain.counted} else ""
    return (
        f"{run.place(layer)} gives something else when it is computed again, and draws no random numbers from "
        f"torch's generator: {norm}it depends on something that changes between two calls"
    )
