"""Explains a difference in the loss, in the gradient norm, in BatchNorm's statistics, or between replicas."""

from __future__ import annotations

import math

import torch

from .. import compare as c
from ..check import Checker, ComparedStep
from ..compare import Difference, Gap
from ..layout import VerifiedRun, listed
from ..record import RECOMPUTED, Key, Place, of_kind
from .forward import measured

# -- loss --------------------------------------------------------------------------------------------------------------


def explain_loss(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Returns what is wrong with the loss or the task's statistics, as sentences; empty where nothing is."""
    assert now.plain is not None
    sums = now.found[c.STATISTICS].beyond
    if now.found[c.LOSSES].beyond:
        return [_losses(now, run) + _only_reported(now)]
    if now.found[c.LOSS].beyond:
        weight = sum(now.ours.losses.values()) / now.ours.loss if now.ours.loss else math.nan
        text = f"the losses of all micro-batches agree, but the loss is {_ratio(now):.6g} times that of the plain loop"
        divided = f"it was divided by a weight of {weight:.6g} instead of {now.plain.weight:.6g}"
        return [f"{text}: {divided}{_only_reported(now)}"]
    return [f"the losses agree, but not the task's statistics: {', '.join(d.where for d in sums)}"] if sums else []


def _ratio(now: ComparedStep) -> float:
    assert now.plain is not None
    return now.ours.loss / now.plain.loss if now.plain.loss else math.nan


def _only_reported(now: ComparedStep) -> str:
    return "" if now.found[c.GRADIENTS].beyond else "; all gradients agree, so only the report is wrong"


def _losses(now: ComparedStep, run: VerifiedRun) -> str:
    """Explains losses of micro-batches that differ although the outputs of all layers agree."""
    assert now.plain is not None
    ours, plain = now.ours.losses, now.plain.losses
    least = min(d.relative for d in now.found[c.LOSSES].beyond)
    wrong = [
        place for place, loss in plain.items() if abs(ours.get(place, math.inf) - loss) >= 0.999 * least * abs(loss)
    ]
    text = f"the outputs of all layers agree, but the loss of {run.micro_batches(wrong)} differs"
    first, others = wrong[0], [place for place in plain if place != wrong[0]]
    like = next((place for place in others if abs(ours[first] - plain[place]) <= 1e-6 * abs(plain[place])), None)
    if like is not None:
        return f"{text}: that of {run.micro_batches([first])} is that of {run.micro_batches([like])}"
    times = _times_auxiliary(now, wrong)
    if times is not None:
        return f"{text}: the auxiliary losses of layers count {times:.4g} times"
    factors = {round(ours[place] / plain[place], 5) for place in wrong if plain[place]}
    if len(factors) == 1:
        return f"{text}, {factors.pop():g} times what it should be each"
    return f"{text}: their targets, or the task's loss, differ"


def _times_auxiliary(now: ComparedStep, wrong: list[Place]) -> float | None:
    """Returns the factor of the auxiliary losses, if one factor explains all losses that differ."""
    assert now.plain is not None
    plain, parts = now.plain.losses, now.plain.auxiliary
    if not all(parts.get(place) for place in wrong):
        return None
    times = [1 + (now.ours.losses[place] - plain[place]) / parts[place] for place in wrong]
    return times[0] if max(times) - min(times) < 1e-2 else None


# -- gradient norm -----------------------------------------------------------------------------------------------------


def explain_norm(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Returns what is wrong with the norm of gradients that agree; empty where it agrees, too."""
    if not now.found[c.NORM].beyond or now.plain is None:
        return []
    ours, right = now.ours.gradient_norm, now.plain.gradient_norm
    return [f"all gradients agree, but their norm is {ours:.6g} instead of {right:.6g}{_norm_of_what(now, run)}"]


def _norm_of_what(now: ComparedStep, run: VerifiedRun) -> str:
    assert now.plain is not None
    ours, factor = now.ours.gradient_norm, now.ours.gradient_norm / (now.plain.gradient_norm or math.nan)
    for cell in sorted(set(run.cells)):
        of_cell = c.total(norm for (layer, _), norm in now.plain.norms.items() if run.cells[layer] == cell)
        if abs(of_cell - ours) <= 1e-4 * ours:
            return f": that of cell {cell} alone"
    if run.replicas > 1 and abs(factor / math.sqrt(run.replicas) - 1) < 1e-4:
        return f", {factor:.4g} times as large: the squares of all {run.replicas} replicas were added up"
    return f", {factor:.4g} times as large"


# -- BatchNorm and buffers ---------------------------------------------------------------------------------------------


def explain_buffers(now: ComparedStep, before: ComparedStep | None, checker: Checker) -> list[str]:
    """Returns what is wrong with buffers although the outputs of all layers agree, as sentences."""
    assert now.plain is not None
    if now.found[c.OUTPUTS].beyond:
        return []
    buffers, run = now.found[c.BUFFERS].beyond, checker.run
    tracked = _updates_of_averages(now, run)
    if tracked or now.found[c.COUNTS].beyond:
        return tracked or _counts(now, before)
    if not buffers:
        return []
    first = buffers[0]
    if any(first.where.startswith(name) for _, name in now.plain.counted):
        place = f"{first.where} of {run.place(first.layer)} differs ({measured(first)})"
        return [f"BatchNorm's {place}{_of_averages(now, first, checker)}"]
    return [
        f"the buffer {first.where} of {run.place(first.layer)} differs: a layer that changes its own buffer in "
        "forward changes it again in recompute"
    ]


def _updates_of_averages(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Explains moving averages that were not updated once."""
    for difference in now.found[c.BUFFERS].beyond:
        gap = now.gaps[c.BUFFERS][difference.layer, difference.where]
        if difference.where.endswith("num_batches_tracked") and gap.plain and math.isfinite(gap.distance):
            times, name = round(gap.product / gap.plain**2, 6), difference.where.rpartition(".")[0]
            how = "were never updated" if times == 0 else f"were updated {times:g} times in a step instead of once"
            return [f"the moving averages of BatchNorm {name} of {run.place(difference.layer)} {how}"]
    return []


def _counts(now: ComparedStep, before: ComparedStep | None) -> list[str]:
    assert now.plain is not None
    first = now.found[c.COUNTS].beyond[0]
    ours, plain = now.ours.counted.get((first.layer, first.where), 0.0), now.plain.counted[first.layer, first.where]
    text = f"BatchNorm {first.where} averaged over {ours:.0f} values a channel instead of {plain:.0f}"
    if before is not None and before.plain is None and ours > plain:
        return [f"{text}: the statistics of the skipped step before are among them"]
    if plain < ours <= 2 * plain and first.layer in {point.layer for point in now.ours.trace.get(RECOMPUTED, {})}:
        return [f"{text}: counted twice, in forward and again in recompute"]
    return [text]


def _of_averages(now: ComparedStep, first: Difference, checker: Checker) -> str:
    """Explains a moving average that was updated once and has a wrong value."""
    gaps, name = now.gaps[c.BUFFERS], first.where.rpartition(".")[0]
    mean = gaps[first.layer, f"{name}.running_mean"]
    factor = gaps[first.layer, first.where].factor
    if factor is not None and abs(factor - 1) > 1e-2:
        return f": it moved {factor:.4g} times as far as it should: another momentum"
    if first.where.endswith("running_var") and mean.distance <= 1e-4 * max(mean.plain, 1e-30):
        if _is_of_a_sample(now, (first.layer, first.where), gaps[first.layer, first.where], checker):
            return ": the mean is right, the variance was divided by n - 1 instead of n"
        return ": the mean is right, the variance is not"
    if checker.run.replicas > 1:
        return ": the statistics of all replicas were not added up"
    return ""


def _is_of_a_sample(now: ComparedStep, key: Key, gap: Gap, checker: Checker) -> bool:
    assert now.plain is not None
    old = of_kind("buffer", checker.spill.get(now.before, key[0])).get(key[1])
    new = of_kind("buffer", checker.spill.get(f"held {now.number}", key[0])).get(key[1])
    count = now.plain.counted.get((key[0], key[1].rpartition(".")[0]), 0.0)
    norm = next((n for k, n in checker.model.build([key[0]]).batchnorms.items() if key[1].startswith(k[1])), None)
    if old is None or new is None or norm is None or norm.momentum is None or count < 2:
        return False
    expected = float(torch.linalg.vector_norm((new - old * (1 - norm.momentum)).double())) / count
    return abs(expected - gap.distance) <= 1e-2 * expected


# -- replicas ----------------------------------------------------------------------------------------------------------


def explain_replicas(now: ComparedStep, run: VerifiedRun) -> list[str]:
    """Returns which replicas end the step with other values than the first, as a sentence; empty where none does."""
    beyond = now.found[c.REPLICAS].beyond
    if not beyond:
        return []
    first, which = beyond[0], listed("replica", {d.point.replica for d in beyond if d.point})
    return [
        f"replica 0 is right, but {which} ended the step with other values than replica 0: "
        f"{len({d.layer for d in beyond})} layers differ, first {run.place(first.layer)} ({first.where})"
    ]
