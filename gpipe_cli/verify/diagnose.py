"""Explains the differences of two runs: which layer differs first, and the most likely cause.

Forward comes before recompute, recompute before the loss, the loss before backward, backward before the update: a
difference in one makes differences in all that follow, so the first of them is the one to explain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from . import compare as c
from .check import Checker, ComparedStep
from .compare import Difference
from .explain_update import explain_update
from .layout import VerifiedRun, listed
from .record import GRADIENT, RECOMPUTED, WEIGHTS, WEIGHTS_AGAIN, Fingerprint, Point
from .reference import noise_seed


def diagnose(steps: Sequence[ComparedStep], checker: Checker) -> list[str]:
    """Returns findings about the first step that differs, as sentences; empty when no step differs."""
    wrong = next((number for number, compared in enumerate(steps) if not compared.found.agrees), None)
    if wrong is None:
        return []
    now, before, run = steps[wrong], steps[wrong - 1] if wrong else None, checker.run
    found = _held(now, run)
    if not found and now.plain is not None:
        found = _forward(now, before, run) or _recompute(now, before, run) or _loss(now, run) or _backward(now, run)
        found += _batchnorm(now, run)
        found = found or explain_update(now, checker) or _replicas(now, run)
    found = found or [f"{', '.join(q.name for q in now.found.quantities if q.beyond)}: different, in no known pattern"]
    return [f"step {now.number}: {sentence}" for sentence in found]


def measured(difference: Difference) -> str:
    return f"relative difference {difference.relative:.1e}"


# -- what is held between the steps ------------------------------------------------------------------------------------


def _held(now: ComparedStep, run: VerifiedRun) -> list[str]:
    texts = {
        c.BEGIN: "before any training {place} has other weights",
        c.RESUMED: "after a checkpoint and a resume {place} does not hold what was saved",
        c.SKIPPED: "the loss was not finite, so the update had to be skipped, but {place} has changed",
    }
    for name, text in texts.items():
        beyond = now.found[name].beyond
        if beyond:
            first = beyond[0]
            more = f"; {len(now.found[name].layers)} layers differ" if len(now.found[name].layers) > 1 else ""
            return [f"{text.format(place=run.place(first.layer))} ({measured(first)}, {first.where}){more}"]
    return []


# -- forward and recompute ---------------------------------------------------------------------------------------------


def _forward(now: ComparedStep, before: ComparedStep | None, run: VerifiedRun) -> list[str]:
    stale = _used_weights(now, before, run, WEIGHTS)
    beyond = now.found[c.OUTPUTS].beyond
    if not beyond:
        return stale or _noise(now, run, WEIGHTS)
    first = beyond[0]
    where = f"({measured(first)}, {first.where})"
    head = f"first in forward, the output of {run.place(first.layer)} differs {where}"
    if stale:
        return [head, *stale]
    noise = _noise(now, run, WEIGHTS)
    if noise:
        return [head, *noise]
    if any(difference.layer == first.layer for difference in now.found[c.AGAIN].beyond):
        return [head, _not_repeatable(first.layer, run)]
    assert now.plain is not None
    if first.layer in now.plain.draws_noise:
        return [head, f"{run.place(first.layer)} drew other random numbers in forward, or was given another input"]
    return [head, f"{run.place(first.layer)} used the right weights: its input, or what it computes, is another"]


def _recompute(now: ComparedStep, before: ComparedStep | None, run: VerifiedRun) -> list[str]:
    beyond = now.found[c.AGAIN].beyond
    if not beyond:
        return _used_weights(now, before, run, WEIGHTS_AGAIN) or _noise(now, run, WEIGHTS_AGAIN)
    first = beyond[0]
    place = run.place(first.layer)
    head = (
        f"forward agrees, but computed again for backward the output of {place} is another "
        f"({measured(first)}, {first.where})"
    )
    causes = _used_weights(now, before, run, WEIGHTS_AGAIN) or _noise(now, run, WEIGHTS_AGAIN)
    return [head, *(causes or [_not_repeatable(first.layer, run)])]


def _not_repeatable(layer: int, run: VerifiedRun) -> str:
    return (
        f"{run.place(layer)} gives something else when it is computed again, and draws no random numbers from "
        "torch's generator: it depends on something that changes between two calls"
    )


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
    if before is not None and before.plain is not None and _agree(wrong_marks, before.plain.used):
        return [f"{who} stale weights in {when}: those of the step before, without its update ({which})"]
    return [f"{who} other weights in {when} than were held before the step ({which})"]


def _differs(now: ComparedStep, point: Point, kind: str) -> bool:
    assert now.plain is not None
    right, mark = now.plain.used[point.layer, point.number], now.ours.trace[kind][point]
    return mark.distance(right) > 1e-12 * max(right.norm, 1e-30)


def _agree(used: Mapping[Point, Fingerprint], old: Mapping[tuple[int, int], Fingerprint]) -> bool:
    pairs = [(mark, old[point.layer, point.number]) for point, mark in used.items()]
    return all(mark.distance(one) <= 1e-9 * max(one.norm, 1e-30) for mark, one in pairs)


def _noise(now: ComparedStep, run: VerifiedRun, kind: str) -> list[str]:
    """Explains a wrong seed of a layer's random numbers: whose seed it is, where that can be found."""
    drawn, right = now.ours.seeds.get(kind, {}), now.expected_seeds
    wrong = sorted((layer, m, r) for (r, m, layer), seed in drawn.items() if right.get((r, m, layer), seed) != seed)
    if not wrong:
        return []
    layer, m, r = wrong[0]
    whose = _owner(drawn[r, m, layer], now.number - 1, r, m, layer, run)
    layers = {layer for layer, _, _ in wrong}
    which = run.micro_batches((r, m) for other, m, r in wrong if other == layer)
    if len(layers) > 1:
        which += f"; {len(layers)} layers in {run.cells_of(layers)}"
    if kind == WEIGHTS_AGAIN:
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


def _loss(now: ComparedStep, run: VerifiedRun) -> list[str]:
    assert now.plain is not None
    whole, parts, sums = now.found[c.LOSS].beyond, now.found[c.LOSSES].beyond, now.found[c.STATISTICS].beyond
    ratio = now.ours.loss / now.plain.loss if now.plain.loss else math.nan
    if parts:
        tolerance = min(d.relative for d in parts)
        wrong = [
            place
            for place, loss in now.plain.losses.items()
            if abs(now.ours.losses.get(place, math.inf) - loss) >= tolerance * abs(loss) * 0.999
        ]
        factors = {round(now.ours.losses[p] / now.plain.losses[p], 5) for p in wrong if now.plain.losses[p]}
        each = f", {factors.pop():g} times too large each" if len(factors) == 1 else ""
        text = f"the outputs of all layers agree, but the loss is {ratio:.6g} times that of the plain loop: "
        return [f"{text}that of {run.micro_batches(wrong)} differs{each} (all {len(now.plain.losses)} were compared)"]
    if whole:
        weight = sum(now.ours.losses.values()) / now.ours.loss if now.ours.loss else math.nan
        return [
            f"the losses of all micro-batches agree, but the loss is {ratio:.6g} times that of the plain loop: it was "
            f"divided by a weight of {weight:.6g} instead of {now.plain.weight:.6g}"
        ]
    return [f"the losses agree, but not the task's statistics: {', '.join(d.where for d in sums)}"] if sums else []


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(now: ComparedStep, run: VerifiedRun) -> list[str]:
    beyond = now.found[c.GRADIENTS].beyond
    if not beyond:
        text = f"all gradients agree, but their norm is {now.ours.gradient_norm:.6g} instead of "
        norm = now.plain.gradient_norm if now.plain else math.nan
        return [f"{text}{norm:.6g}"] if now.found[c.NORM].beyond else []
    layer = max(d.layer for d in beyond)
    worst = max((d for d in beyond if d.layer == layer), key=lambda d: d.relative)
    share = "all parameters" if len(beyond) == now.found[c.GRADIENTS].compared else f"{len(beyond)} parameters"
    head = (
        f"forward agrees; walking back from the loss, the first gradient that differs is that of {run.place(layer)} "
        f"({measured(worst)}, {worst.where}); {share} differ, in {run.cells_of(d.layer for d in beyond)}"
    )
    return [head, *_factor(now, beyond, run), *_where_it_comes_in(now, run)]


def _factor(now: ComparedStep, beyond: Sequence[Difference], run: VerifiedRun) -> list[str]:
    """Explains gradients that are all those of the plain loop times one number."""
    gaps = now.gaps[c.GRADIENTS]
    factor = common_factor([gaps[difference.layer, difference.where].factor for difference in beyond])
    if factor is None or abs(factor - 1) < 1e-2:
        return []
    if abs(factor) < 1e-6:
        return ["these gradients are zero: nothing flows back to them"]
    names = {"M": run.M, "the number of replicas": run.replicas}
    for name, value in names.items():
        if value > 1 and abs(factor / value - 1) < 1e-2:
            return [f"they are {value} times too large: scaled by {name} = {value}"]
        if value > 1 and abs(factor * value - 1) < 1e-2:
            return [f"they are {value} times too small: divided by {name} = {value}"]
    return [f"they are {factor:.6g} times those of the plain loop"]


def common_factor(factors: Sequence[float | None]) -> float | None:
    """Returns the factor if all are the same within a hundredth; else None."""
    known = sorted(factor for factor in factors if factor is not None)
    if not known or len(known) < len(factors):
        return None
    middle = known[len(known) // 2]
    return middle if known[-1] - known[0] <= 2e-2 * max(abs(middle), 1e-3) else None


def _where_it_comes_in(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Names the gradient between two layers that is the first, from the loss, to differ."""
    assert now.plain is not None
    beyond = now.found[c.PASSED_BACK].beyond
    if not beyond:
        return ["the gradients that pass between the layers agree: it is lost or changed where parameters collect them"]
    layer = max(d.layer for d in beyond)
    which = run.micro_batches((d.point.replica, d.point.micro_batch) for d in beyond if d.layer == layer and d.point)
    if layer == len(run.names) - 1:
        return [f"already the gradient that the loss hands to {run.place(layer)} differs ({which})"]
    traced = {point.layer for point in now.plain.seen.trace[GRADIENT]}
    behind = next((other for other in range(layer + 1, len(run.names)) if other in traced), layer + 1)
    between = f"between {run.place(layer)} and {run.place(behind)}"
    if run.cells[layer] != run.cells[behind]:
        return [f"the gradient that crosses the boundary {between} is the first to differ ({which})"]
    return [f"the gradient {between} is the first to differ ({which})"]


# -- what a step leaves ------------------------------------------------------------------------------------------------


def _batchnorm(now: ComparedStep, run: VerifiedRun) -> list[str]:
    assert now.plain is not None
    counts, buffers = now.found[c.COUNTS].beyond, now.found[c.BUFFERS].beyond
    if counts:
        first = counts[0]
        key = first.layer, first.where
        ours, plain = now.ours.counted.get(key, 0.0), now.plain.counted[key]
        again = {point.layer for point in now.ours.trace.get(RECOMPUTED, {})}
        text = f"BatchNorm {first.where} averaged over {ours:.0f} values a channel instead of {plain:.0f}"
        if plain < ours <= 2 * plain and first.layer in again:
            text += ": counted twice, in forward and again in recompute"
        return [text]
    if not buffers or now.found[c.OUTPUTS].beyond:
        return []
    first = buffers[0]
    if any(first.where.startswith(name) for _, name in now.plain.counted):
        tracked = [d for d in buffers if d.where.endswith("num_batches_tracked")]
        twice = ": the moving averages were updated more or less than once" if tracked else ""
        return [f"BatchNorm's {first.where} of {run.place(first.layer)} differs ({measured(first)}){twice}"]
    return [
        f"the buffer {first.where} of {run.place(first.layer)} differs: a layer that changes its own buffer in "
        "forward changes it again in recompute"
    ]


def _replicas(now: ComparedStep, run: VerifiedRun) -> list[str]:
    beyond = now.found[c.REPLICAS].beyond
    if not beyond:
        return []
    first, which = beyond[0], listed("replica", {d.point.replica for d in beyond if d.point})
    layers = {d.layer for d in beyond}
    return [
        f"replica 0 is right, but {which} ended the step with other values than replica 0: {len(layers)} layers "
        f"differ, first {run.place(first.layer)} ({first.where})"
    ]
