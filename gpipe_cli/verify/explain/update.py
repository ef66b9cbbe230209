"""Explains an update that differs although the gradients agree: clipping, learning rate, decay, or the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import compare as c
from ..check import Checker, ComparedStep, state_of
from ..compare import Difference, measure
from ..layout import VerifiedRun
from ..record import of_kind
from ..reference import Update, update
from .backward import common_factor
from .forward import measured
from .tied import explain_tied_value


def explain_update(now: ComparedStep, checker: Checker) -> list[str]:
    """Returns what is wrong with an update, as sentences; empty where it is right."""
    run = checker.run
    return (
        _clipping(now, run)
        or _rate(now, checker)
        or explain_tied_value(now, checker)
        or _unmoved(now, run)
        or _optimizer(now, checker)
        or _averages(now, run)
    )


def _clipping(now: ComparedStep, run: VerifiedRun) -> list[str]:
    beyond = now.found[c.CLIPPED].beyond
    if not beyond:
        return []
    gaps, used = now.gaps[c.GRADIENTS], now.ours.used
    by_cell: dict[int, float] = {}
    for difference in beyond:
        key = difference.layer, difference.where
        by_cell.setdefault(run.cells[difference.layer], used[key] / gaps[key].ours)
    factors = _by_cell(by_cell, run)
    text = f"gradients agree, but clipping should have multiplied them by {now.factor:.6g}, and multiplied by {factors}"
    if all(abs(factor - 1) < 1e-6 for factor in by_cell.values()):
        return [f"{text}: gradients were not clipped"]
    return [text + _own_norm(now, run, by_cell)]


def _own_norm(now: ComparedStep, run: VerifiedRun, by_cell: dict[int, float]) -> str:
    """Names the norm by which gradients were clipped, if it is that of each cell alone."""
    limit = now.factor * now.ours.gradient_norm
    gaps = now.gaps[c.GRADIENTS]
    for cell, factor in by_cell.items():
        own = c.total(gap.ours for key, gap in gaps.items() if run.cells[key[0]] == cell)
        if not own or abs(factor * own / limit - 1) > 1e-3:
            return ""
    return ": each cell by the norm of its own gradients, instead of the norm of all"


def _rate(now: ComparedStep, checker: Checker) -> list[str]:
    beyond = now.found[c.RATES].beyond
    if not beyond:
        return []
    run, right, rates = checker.run, checker.rate(now.number), now.ours.rates
    by_cell = {run.cells[d.layer]: rates[d.layer, d.where] for d in beyond}
    used, one = _by_cell(by_cell, run), next(iter(by_cell.values()))
    near = [n for n in range(1, now.number + 10) if n != now.number and _close(checker.rate(n), one)]
    whose = f", which is that of step {near[0]}" if near else ""
    return [f"the learning rate of step {now.number} is {right:.8g}, but the update used {used}{whose}"]


def _by_cell(numbers: dict[int, float], run: VerifiedRun) -> str:
    """Returns a number of each cell as text, equal ones once."""
    if len(numbers) == len(set(run.cells)) and len({f"{number:.6g}" for number in numbers.values()}) == 1:
        return f"{next(iter(numbers.values())):.6g} in every cell"
    return ", ".join(f"{number:.6g} in cell {cell}" for cell, number in sorted(numbers.items()))


def _close(a: float | None, b: float) -> bool:
    return a is not None and abs(a - b) <= 1e-9 * abs(b)


def _unmoved(now: ComparedStep, run: VerifiedRun) -> list[str]:
    beyond, gaps = now.found[c.UPDATED].beyond, now.gaps[c.UPDATED]
    layers = sorted({d.layer for d in beyond if all(gap.ours == 0.0 for key, gap in gaps.items() if key[0] == d.layer)})
    if not layers:
        return []
    return [f"gradients agree, but the weights of {run.place(layers[0])} were not updated ({run.cells_of(layers)})"]


CAUSES: dict[str, dict[str, Any]] = {
    "its memory of earlier steps was lost": {"state": None},
    "weight decay was left out": {"weight_decay": 0.0},
    "weight decay was applied to every parameter, also to those of one dimension": {"decay_only": None},
    "the update was made twice": {"times": 2},
}


def _optimizer(now: ComparedStep, checker: Checker) -> list[str]:
    updated, state, run = now.found[c.UPDATED], now.found[c.STATE], checker.run
    beyond = state.beyond or updated.beyond
    if not beyond:
        return []
    first = beyond[0]
    what = "the optimizer's state" if state.beyond else "what the update makes of the weights"
    layers = updated.layers or state.layers
    text = (
        f"gradients agree, but {what} differs, first in {run.place(first.layer)} ({measured(first)}, {first.where}), "
        f"in {run.cells_of(layers)}"
    )
    named = [cause for cause, changed in CAUSES.items() if checker.alternative(now, layers, changed)]
    if not named and any(difference.where.endswith(":step") for difference in state.beyond):
        named = ["its memory of earlier steps was lost"]
    named = named or _state_of_another(now, checker, first) or _rounded(now, checker, layers) or _farther(now)
    return [f"{text}: {named[0] if named else 'the optimizer itself, or its settings'}"]


def _state_of_another(now: ComparedStep, checker: Checker, first: Difference) -> list[str]:
    """Names the parameter whose state the optimizer used for another of the same shape."""
    name = first.where.rpartition(":")[0] or first.where
    old = checker.spill.get(now.before, first.layer)
    new, weight = checker.spill.get(f"held {now.number}", first.layer), old.get(f"weight/{name}")
    gradient = checker.spill.get(f"gradients {now.number}", first.layer).get(name)
    if weight is None or gradient is None:
        return []
    for layer in range(len(checker.run.names)):
        tensors = checker.spill.get(now.before, layer)
        for other, value in of_kind("weight", tensors).items():
            if value.shape != weight.shape or other == name:
                continue
            before = Update(weight, state_of(tensors, other))
            made = update(checker.settings.optimizer, checker.rate(now.number), before, gradient * now.factor)
            gap = measure(new.get(f"weight/{name}"), made.weight, weight)
            if gap.distance <= 1e-3 * gap.plain:
                return [f"it used the state of {other} for {name}"]
    return []


def _rounded(now: ComparedStep, checker: Checker, layers: Sequence[int]) -> list[str]:
    """Names a type with fewer digits in which the weights are after the update."""
    for dtype in (torch.bfloat16, torch.float16):
        held = [checker.spill.get(f"held {now.number}", layer) for layer in layers]
        weights = [weight for tensors in held for weight in of_kind("weight", tensors).values()]
        if weights and all(torch.equal(weight.to(dtype).to(weight.dtype), weight) for weight in weights):
            return [f"the weights were rounded to {str(dtype).removeprefix('torch.')}"]
    return []


def _farther(now: ComparedStep) -> list[str]:
    """Explains weights that moved in the right direction by a wrong distance: names the factor."""
    gaps = now.gaps[c.UPDATED]
    factor = common_factor([gaps[d.layer, d.where].factor for d in now.found[c.UPDATED].beyond])
    return [] if factor is None else [f"the weights moved {factor:.4g} times as far, as with another learning rate"]


def _averages(now: ComparedStep, run: VerifiedRun) -> list[str]:
    beyond = now.found[c.AVERAGES].beyond
    if not beyond:
        return []
    first = beyond[0]
    place = f"{run.place(first.layer)} ({measured(first)}, {first.where})"
    text = f"the update is right, but not the moving average of the weights, first in {place}"
    gaps = [now.gaps[c.AVERAGES][d.layer, d.where] for d in beyond]
    if all(gap.ours == 0.0 for gap in gaps):
        return [f"{text}: it was not updated in {run.cells_of(d.layer for d in beyond)}"]
    factor = common_factor([gap.factor for gap in gaps])
    if factor is None:
        return [f"{text}: it follows other weights, such as those before the update"]
    return [f"{text}: it moved {factor:.4g} times as far as trainer.average says, as after another number of updates"]
