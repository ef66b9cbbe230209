"""Explains the differences of two runs: which layer differs first, and the most likely cause.

Forward comes before recompute, recompute before backward, backward before the update: a difference in one makes
differences in all that follow, so the first of them is the one to explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compare import (
    AGAIN,
    BEGIN,
    BUFFERS,
    COUNTS,
    GRADIENTS,
    LOSS,
    LOSSES,
    NORM,
    OUTPUTS,
    PASSED_BACK,
    STATE,
    UPDATED,
    Difference,
    StepComparison,
    weights_used,
)
from .record import GRADIENT, RECOMPUTED, WEIGHTS, WEIGHTS_AGAIN, Fingerprint, Key, Point, StepState


@dataclass(frozen=True)
class VerifiedRun:
    """Describes the model's layers and the run's division into cells, micro-batches and replicas.

    Attributes:
        names: of the layers.
        cells: the cell of each layer.
        draws_noise: layers that draw random numbers.
        M: micro-batches of a replica.
        clip: `trainer.gradient_clip`.
    """

    names: Sequence[str]
    cells: Sequence[int]
    draws_noise: frozenset[int]
    M: int
    replicas: int
    clip: float | None

    def place(self, layer: int) -> str:
        return f"layer {self.names[layer]} (cell {self.cells[layer]})"


@dataclass(frozen=True)
class ComparedStep:
    """Holds both sides of one step and their comparison.

    Attributes:
        number: of the step, from 1.
        before: weights and buffers of the plain loop before the step.
    """

    number: int
    ours: StepState
    plain: StepState
    before: StepState
    found: StepComparison


def diagnose(steps: Sequence[ComparedStep], layout: VerifiedRun, tolerance: float) -> list[str]:
    """Returns findings about the first step that differs, as sentences; empty when no step differs."""
    wrong = next((number for number, compared in enumerate(steps) if not compared.found.agrees), None)
    if wrong is None:
        return []
    now, before = steps[wrong], steps[wrong - 1] if wrong else None
    found = _beginning(now, layout) or _forward(now, before, layout, tolerance)
    found = found or _recompute(now, before, layout, tolerance) or _backward(now, layout)
    found += _batchnorm(now, layout)
    found = found or _update(now, layout)
    found = found or [f"{', '.join(q.name for q in now.found.quantities if q.beyond)}: different, in no known pattern"]
    return [f"step {now.number}: {sentence}" for sentence in found]


# -- forward and recompute ---------------------------------------------------------------------------------------------


def _beginning(now: ComparedStep, layout: VerifiedRun) -> list[str]:
    beyond = now.found[BEGIN].beyond
    if not beyond:
        return []
    first = beyond[0]
    return [f"before any training {layout.place(first.layer)} has other weights ({_measure(first)}, {first.where})"]


def _forward(now: ComparedStep, before: ComparedStep | None, layout: VerifiedRun, tolerance: float) -> list[str]:
    beyond = now.found[OUTPUTS].beyond
    if not beyond:
        return _loss(now)
    first = beyond[0]
    head = f"first in forward, the output of {layout.place(first.layer)} differs ({_measure(first)}, {first.where})"
    used = {d.layer for d in weights_used(now.ours, now.plain, layout.names, again=False) if d.relative > tolerance}
    if first.layer in used:
        return [head, _old_weights(now, before, sorted(used), layout, tolerance, WEIGHTS)]
    if first.layer in layout.draws_noise:
        return [head, f"{layout.place(first.layer)} drew other random numbers in forward, or was given another input"]
    if any(difference.layer == first.layer for difference in now.found[AGAIN].beyond):
        return [head, _not_repeatable(first.layer, layout)]
    return [head, f"{layout.place(first.layer)} used the right weights: its input, or what it computes, is another"]


def _loss(now: ComparedStep) -> list[str]:
    if not (now.found[LOSS].beyond or now.found[LOSSES].beyond):
        return []
    ratio = now.ours.loss / now.plain.loss if now.plain.loss else math.nan
    return [f"the outputs of all layers agree, but the loss is {ratio:.6g} times that of the plain loop"]


def _recompute(now: ComparedStep, before: ComparedStep | None, layout: VerifiedRun, tolerance: float) -> list[str]:
    beyond = now.found[AGAIN].beyond
    if not beyond:
        return []
    first = beyond[0]
    place = layout.place(first.layer)
    head = (
        f"forward agrees, but computed again for backward the output of {place} is another "
        f"({_measure(first)}, {first.where})"
    )
    used = {d.layer for d in weights_used(now.ours, now.plain, layout.names, again=True) if d.relative > tolerance}
    if first.layer in used:
        return [head, _old_weights(now, before, sorted(used), layout, tolerance, WEIGHTS_AGAIN)]
    if first.layer in layout.draws_noise:
        return [head, f"recompute drew other random numbers than forward in {place}: a wrong seed for its noise"]
    return [head, _not_repeatable(first.layer, layout)]


def _not_repeatable(layer: int, layout: VerifiedRun) -> str:
    return (
        f"{layout.place(layer)} gives something else when it is computed again, and draws no random numbers from "
        "torch's generator: it depends on something that changes between two calls"
    )


def _old_weights(
    now: ComparedStep,
    before: ComparedStep | None,
    layers: Sequence[int],
    layout: VerifiedRun,
    tolerance: float,
    kind: str,
) -> str:
    """Explains which weights the ``layers`` used, where they were not those of the plain loop."""
    cells = sorted({layout.cells[layer] for layer in layers})
    who = f"cell{'s' if len(cells) > 1 else ''} {', '.join(map(str, cells))}"
    when = "recompute" if kind == WEIGHTS_AGAIN else "forward"
    if before is not None and _agree(now.ours.trace[kind], before.plain.trace[WEIGHTS], layers, tolerance):
        return f"{who} used stale weights in {when}: those of the step before, without its update"
    return f"{who} used other weights in {when} than the plain loop has"


def _agree(
    used: Mapping[Point, Fingerprint], old: Mapping[Point, Fingerprint], layers: Sequence[int], tolerance: float
) -> bool:
    pairs = [(mark, old[point]) for point, mark in used.items() if point.layer in layers and point in old]
    return bool(pairs) and all(mark.distance(one) <= tolerance * 1e-3 * max(one.norm, 1e-30) for mark, one in pairs)


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(now: ComparedStep, layout: VerifiedRun) -> list[str]:
    beyond = now.found[GRADIENTS].beyond
    if not beyond:
        norm = now.found[NORM].worst
        return ["all gradients agree, but their norm does not"] if now.found[NORM].beyond and norm else []
    layer = max(d.layer for d in beyond)
    worst = max((d for d in beyond if d.layer == layer), key=lambda d: d.relative)
    share = "all parameters" if len(beyond) == now.found[GRADIENTS].compared else f"{len(beyond)} parameters"
    head = (
        f"forward agrees; walking back from the loss, the first gradient that differs is that of {layout.place(layer)} "
        f"({_measure(worst)}, {worst.where}); {share} differ"
    )
    return [head, *_factor(now, beyond, layout), *_where_it_comes_in(now, layout)]


def _factor(now: ComparedStep, beyond: Sequence[Difference], layout: VerifiedRun) -> list[str]:
    """Explains gradients that are all those of the plain loop times one number."""
    where = {difference.where for difference in beyond}
    keys = [key for key in now.plain.gradients if key in now.ours.gradients and key[1] in where]
    factor = _common_factor((now.ours.gradients[key], now.plain.gradients[key]) for key in keys)
    if factor is None or abs(factor - 1) < 1e-2:
        return []
    if abs(factor) < 1e-6:
        return ["these gradients are zero: nothing flows back to them"]
    names = {"M": layout.M, "the number of replicas": layout.replicas}
    for name, value in names.items():
        if value > 1 and abs(factor / value - 1) < 1e-2:
            return [f"they are {value} times too large: scaled by {name} = {value}"]
        if value > 1 and abs(factor * value - 1) < 1e-2:
            return [f"they are {value} times too small: divided by {name} = {value}"]
    return [f"they are {factor:.6g} times those of the plain loop"]


def _common_factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Returns f if in every pair the first is f times the second, within a hundredth; else None."""
    factors = [_multiple(ours, plain) for ours, plain in pairs]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors):
        return None
    middle = sorted(known)[len(known) // 2]
    alike = all(abs(factor - middle) <= 1e-2 * max(abs(middle), 1e-3) for factor in known)
    return middle if alike else None


def _multiple(ours: Tensor, plain: Tensor) -> float | None:
    """Returns f if ``ours`` = f · ``plain`` within a hundredth, else None."""
    a, b = ours.double(), plain.double()
    square = float((b * b).sum())
    if not square:
        return None
    factor = float((a * b).sum()) / square
    rest = float(torch.linalg.vector_norm(a - factor * b))
    return factor if rest <= 1e-2 * math.sqrt(square) * max(abs(factor), 1e-3) else None


def _where_it_comes_in(now: ComparedStep, layout: VerifiedRun) -> list[str]:
    """Names the gradient between two layers that is the first, from the loss, to differ."""
    beyond = now.found[PASSED_BACK].beyond
    if not beyond:
        return ["the gradients that pass between the layers agree: it is lost or changed where parameters collect them"]
    layer = max(d.layer for d in beyond)
    micro_batches = sorted({d.point.micro_batch for d in beyond if d.layer == layer and d.point is not None})
    which = f"micro-batch{'es' if len(micro_batches) > 1 else ''} {', '.join(map(str, micro_batches))}"
    if layer == len(layout.names) - 1:
        return [f"already the gradient that the loss hands to {layout.place(layer)} differs ({which})"]
    traced = {point.layer for point in now.plain.trace[GRADIENT]}
    behind = next((other for other in range(layer + 1, len(layout.names)) if other in traced), layer + 1)
    between = f"between {layout.place(layer)} and {layout.place(behind)}"
    if layout.cells[layer] != layout.cells[behind]:
        return [f"the gradient that crosses the boundary {between} is the first to differ ({which})"]
    return [f"the gradient {between} is the first to differ ({which})"]


# -- what a step leaves ------------------------------------------------------------------------------------------------


def _batchnorm(now: ComparedStep, layout: VerifiedRun) -> list[str]:
    counts, buffers = now.found[COUNTS].beyond, now.found[BUFFERS].beyond
    if counts:
        first = counts[0]
        ours, plain = now.ours.counted.get((first.layer, first.where), 0.0), now.plain.counted[first.layer, first.where]
        again = {point.layer for point in now.ours.trace.get(RECOMPUTED, {})}
        text = f"BatchNorm {first.where} averaged over {ours:.0f} values a channel instead of {plain:.0f}"
        if plain < ours <= 2 * plain and first.layer in again:
            text += ": counted twice, in forward and again in recompute"
        return [text]
    if not buffers or now.found[OUTPUTS].beyond:
        return []
    first = buffers[0]
    if any(first.where.startswith(name) for _, name in now.plain.counted):
        tracked = [d for d in buffers if d.where.endswith("num_batches_tracked")]
        twice = ": the moving averages were updated more or less than once" if tracked else ""
        return [f"BatchNorm's {first.where} differs ({_measure(first)}){twice}"]
    return [
        f"the buffer {first.where} of {layout.place(first.layer)} differs: a layer that changes its own buffer in "
        "forward changes it again in recompute"
    ]


def _update(now: ComparedStep, layout: VerifiedRun) -> list[str]:
    """Explains an update that differs although the gradients agree: the optimizer, its state, or clipping."""
    updated, state = now.found[UPDATED].beyond, now.found[STATE].beyond
    unmoved = sorted({d.layer for d in updated if _unmoved(now, d.layer)})
    if unmoved:
        cells = ", ".join(str(cell) for cell in sorted({layout.cells[layer] for layer in unmoved}))
        return [f"gradients agree, but the weights of {layout.place(unmoved[0])} were not updated (cell {cells})"]
    if not updated and not state:
        return []
    first = (state or updated)[0]
    what = "the optimizer's state" if state else "what the update makes of the weights"
    text = (
        f"gradients agree, but {what} differs, first in {layout.place(first.layer)} ({_measure(first)}, {first.where})"
    )
    if any(difference.where.endswith(":step") for difference in state):
        return [f"{text}: its memory of earlier steps was lost"]
    return [text + _other_gradients(now, state, layout)]


def _other_gradients(now: ComparedStep, state: Sequence[Difference], layout: VerifiedRun) -> str:
    """Names the factor if the update is that of gradients multiplied by one number, as without clipping."""
    linear = [(d.layer, d.where) for d in state if d.where.endswith((":exp_avg", ":momentum_buffer"))]
    if linear:
        factor = _common_factor((now.ours.optimizer[key], now.plain.optimizer[key]) for key in linear)
    else:
        moved = [key for key in now.plain.weights if not torch.equal(now.plain.weights[key], now.before.weights[key])]
        before = now.before.weights
        factor = _common_factor(
            (now.ours.weights[key] - before[key], now.plain.weights[key] - before[key]) for key in moved
        )
    if factor is None or abs(factor - 1) < 1e-2:
        return ": clipping, the learning rate or the optimizer"
    text = f": as if every gradient were {factor:.6g} times as large"
    clipped = now.plain.gradient_norm / layout.clip if layout.clip else 1.0
    return f"{text}: gradients were not clipped" if clipped > 1 and abs(factor / clipped - 1) < 1e-2 else text


def _unmoved(now: ComparedStep, layer: int) -> bool:
    mine: list[Key] = [key for key in now.ours.weights if key[0] == layer]
    return all(torch.equal(now.ours.weights[key], now.before.weights[key]) for key in mine)


def _measure(difference: Difference) -> str:
    return f"relative difference {difference.relative:.1e}"
