"""Explains the differences of two runs: which layer differs first, and the most likely cause.

Forward comes before recompute, recompute before the loss, the loss before backward, backward before the update: a
difference in one makes differences in all that follow, so the first of them is the one to explain.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import compare as c
from ..check import Checker, ComparedStep
from ..layout import VerifiedRun
from .backward import explain_backward
from .forward import explain_forward, explain_recompute, measured
from .statistics import explain_buffers, explain_loss, explain_norm, explain_replicas
from .update import explain_update


def diagnose(steps: Sequence[ComparedStep], checker: Checker) -> list[str]:
    """Returns findings about the first step that differs, as sentences; empty when no step differs."""
    wrong = next((number for number, compared in enumerate(steps) if not compared.found.agrees), None)
    if wrong is None:
        return []
    now, before = steps[wrong], steps[wrong - 1] if wrong else None
    found = _held(now, checker.run)
    if not found and now.plain is not None:
        found = _of_step(now, before, checker) or _evaluation(now, checker.run)
    found = found or [f"{', '.join(q.name for q in now.found.quantities if q.beyond)}: different, in no known pattern"]
    return [f"step {now.number}: {sentence}" for sentence in found]


def _of_step(now: ComparedStep, before: ComparedStep | None, checker: Checker) -> list[str]:
    run = checker.run
    found = explain_forward(now, before, checker) or explain_recompute(now, before, run) or explain_loss(now, run)
    found = found or explain_backward(now, checker) or explain_norm(now, run)
    found += explain_buffers(now, before, checker)
    return found or explain_update(now, checker) or explain_replicas(now, run)


def _held(now: ComparedStep, run: VerifiedRun) -> list[str]:
    texts = {
        c.BEGIN: "before any training {place} has other weights",
        c.RESUMED: "after a checkpoint and a resume {place} does not hold what was saved",
        c.KEPT: "the evaluation after the step has changed {place}: it must leave weights and averages as they were",
        c.SKIPPED: "the loss was not finite, so the update had to be skipped, but {place} has changed",
    }
    for name, text in texts.items():
        beyond = now.found[name].beyond
        if beyond:
            first = beyond[0]
            more = f"; {len(now.found[name].layers)} layers differ" if len(now.found[name].layers) > 1 else ""
            return [f"{text.format(place=run.place(first.layer))} ({measured(first)}, {first.where}){more}"]
    return []


def _evaluation(now: ComparedStep, run: VerifiedRun) -> list[str]:
    assert now.plain is not None
    numbers, averaged = now.found[c.METRICS].beyond, now.found[c.NOT_AVERAGED].beyond
    beyond = averaged or now.found[c.EVALUATED].beyond
    left_out = "in the evaluation after the step, {} differ: its mini-batch was left out"
    if beyond and all(d.where.endswith("missing") for d in beyond):
        return [left_out.format(", ".join(d.where for d in numbers))]
    if beyond:
        first = beyond[0]
        text = f"in the evaluation after the step, the output of {run.place(first.layer)} is the first to differ"
        cause = "it computes something else in evaluation"
        if averaged:
            cause = "the weights were evaluated in place of their averages"
        elif first.layer in {*now.plain.draws_noise, *(layer for layer, _ in now.plain.counted)}:
            cause = "it was not in evaluation mode (dropout, BatchNorm)"
        return [f"{text} ({measured(first)}, {first.where}): {cause}"]
    if not numbers:
        return []
    names = ", ".join(d.where for d in numbers)
    if not now.found[c.EVALUATED].compared:
        return [left_out.format(names)]
    return [f"in the evaluation after the step, {names} differ although the outputs of all layers agree"]
