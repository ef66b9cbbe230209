"""Explains gradients that differ although forward and recompute agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import compare as c
from ..check import Checker, ComparedStep
from ..compare import Difference
from ..layout import VerifiedRun
from ..record import GRADIENT
from .forward import measured
from .likeness import in_factors, likeness
from .parts import explain_parts
from .tied import explain_tied_gradient


def explain_backward(now: ComparedStep, checker: Checker) -> list[str]:
    """Returns what is wrong with gradients, as sentences; empty where they agree."""
    beyond, run = now.found[c.GRADIENTS].beyond, checker.run
    if not beyond:
        return []
    layer = max(d.layer for d in beyond)
    own = [d for d in beyond if d.layer == layer]
    worst = max(own, key=lambda d: d.relative)
    share = "all parameters" if len(beyond) == now.found[c.GRADIENTS].compared else f"{len(beyond)} parameters"
    head = (
        f"forward agrees; walking back from the loss, the first gradient that differs is that of {run.place(layer)} "
        f"({measured(worst)}, {worst.where}); {share} differ, in {run.cells_of(d.layer for d in beyond)}"
    )
    if tied := explain_tied_gradient(now, beyond, checker):
        return [head, *tied]
    frozen = [d.where for d in own if (layer, d.where) not in now.plain.norms] if now.plain is not None else []
    if frozen:
        return [head, f"{frozen[0]} is frozen and got a gradient all the same, so that weight decay may change it"]
    cause = _rounded(now, checker, beyond) or _factor(now, beyond, own, checker)
    return [head, *cause, *_where_it_comes_in(now, layer, checker)]


def _rounded(now: ComparedStep, checker: Checker, beyond: Sequence[Difference]) -> list[str]:
    """Recognises gradients that bfloat16 can hold exactly, which those of the plain loop cannot."""
    layer = beyond[0].layer
    gradients = checker.spill.get(f"gradients {now.number}", layer)
    ours = [gradients[d.where] for d in beyond if d.layer == layer and d.where in gradients]
    if not ours or not all(torch.equal(g, g.bfloat16().to(g.dtype)) and g.any() for g in ours):
        return []
    return [f"the gradients of {checker.run.cells_of(d.layer for d in beyond)} were rounded to bfloat16"]


def _factor(now: ComparedStep, beyond: Sequence[Difference], own: Sequence[Difference], checker: Checker) -> list[str]:
    """Explains gradients that are those of the plain loop times one number: all, or those of the first layer."""
    gaps, run = now.gaps[c.GRADIENTS], checker.run
    for which, them in ((beyond, "these gradients"), (own, f"those of {run.place(own[0].layer)}")):
        factor = common_factor([gaps[difference.layer, difference.where].factor for difference in which])
        if factor is None or abs(factor - 1) < 1e-2:
            continue
        if abs(factor) < 1e-6:
            return [f"{them} are zero: nothing flows back to them{_auxiliary(own[0].layer, checker)}"]
        return [f"{them} are {in_factors(factor, run)}{_auxiliary(own[0].layer, checker)}"]
    return explain_parts(now, checker)


def _auxiliary(layer: int, checker: Checker) -> str:
    module: Any = checker.model.build([layer]).layers[0][2]
    return " (the layer has an auxiliary loss)" if hasattr(module, "auxiliary_loss") else ""


def common_factor(factors: Sequence[float | None]) -> float | None:
    """Returns the factor if all are the same within a hundredth; else None."""
    known = sorted(factor for factor in factors if factor is not None)
    if not known or len(known) < len(factors):
        return None
    middle = known[len(known) // 2]
    return middle if known[-1] - known[0] <= 2e-2 * max(abs(middle), 1e-3) else None


def _where_it_comes_in(now: ComparedStep, first: int, checker: Checker) -> list[str]:
    """Names the gradient between two layers that is the first, from the loss, to differ."""
    assert now.plain is not None
    run, beyond = checker.run, now.found[c.PASSED_BACK].beyond
    if not beyond:
        return ["the gradients that pass between the layers agree: it is lost or changed where parameters collect them"]
    layer = max(d.layer for d in beyond)
    if layer < first - 1:
        return []
    points = sorted(d.point for d in beyond if d.layer == layer and d.point is not None)
    which = run.micro_batches((point.replica, point.micro_batch) for point in points)
    right, came = now.plain.seen.trace[GRADIENT], now.ours.trace.get(GRADIENT, {})
    likes = {likeness(came[point], point, right, run) if point in came else "it never came" for point in points}
    like = f": {next(iter(likes))}" if len(likes) == 1 and "" not in likes else ""
    if layer == len(run.names) - 1:
        return [f"already the gradient that the loss hands to {run.place(layer)} differs ({which}){like}"]
    behind = _behind(now, layer, run)
    norm = any(other == behind for other, _ in now.plain.counted)
    cause = f"; it comes from the BatchNorm of layer {run.names[behind]}" if norm else ""
    crosses = run.cells[layer] != run.cells[behind]
    which_one = "the gradient that crosses the boundary" if crosses else "the gradient"
    between = f"between {run.place(layer)} and {run.place(behind)}"
    return [f"{which_one} {between} is the first to differ ({which}){like}{cause}"]


def _behind(now: ComparedStep, layer: int, run: VerifiedRun) -> int:
    """Returns the next layer that makes new outputs, behind which a gradient passes."""
    assert now.plain is not None
    traced = {point.layer for point in now.plain.seen.trace[GRADIENT]}
    return next((other for other in range(layer + 1, len(run.names)) if other in traced), layer + 1)
