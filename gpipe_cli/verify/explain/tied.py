"""Explains gradients and values of tied parameters that differ: the use that is missing, or was left alone."""

from __future__ import annotations

from collections.abc import Sequence

from .. import compare as c
from ..check import Checker, ComparedStep
from ..compare import Difference
from ..record import Key, fingerprint

TIMES = {0: "lacks", 2: "has twice"}
CLOSE = 1e-4  # relative; projections are numbers that no other gradient has by chance


def explain_tied_gradient(now: ComparedStep, beyond: Sequence[Difference], checker: Checker) -> list[str]:
    """Returns which use's part a wrong gradient lacks, or which use has been trained by itself."""
    assert now.plain is not None
    owners = checker.model.owners
    alone = [d for d in beyond if (d.layer, d.where) in owners]
    if alone:
        of = owners[alone[0].layer, alone[0].where][1]
        return [f"{alone[0].where} is tied to {of}, and was trained by itself: its gradient belongs to that of {of}"]
    for key in ((d.layer, d.where) for d in beyond):
        parts = now.plain.uses.get(key, {})
        gradient = checker.spill.get(f"gradients {now.number}", key[0]).get(key[1])
        if not parts or gradient is None:
            continue
        difference = fingerprint(gradient).projection - sum(part.projection for part in parts.values())
        for use, part in parts.items():
            for times, what in TIMES.items():
                if abs(difference - (times - 1) * part.projection) <= CLOSE * abs(part.projection):
                    whose = f"{use[1]}, which is tied to it" if use != key else "its own layer"
                    return [f"the sum of {key[1]} {what} the gradient of {whose}"]
    return []


def explain_tied_value(now: ComparedStep, checker: Checker) -> list[str]:
    """Returns which use has not got the new value of its owner."""
    owners, wrong = checker.model.owners, now.found[c.UPDATED].beyond
    keys: list[Key] = [(d.layer, d.where) for d in wrong]
    tied = [key for key in keys if key in owners]
    if not tied or len(tied) < len(keys):
        return []
    (layer, name), run = tied[0], checker.run
    what = "has not got" if now.gaps[c.UPDATED][layer, name].ours == 0.0 else "has not exactly"
    value = f"{what} the value of {owners[layer, name][1]}, to which it is tied, after the update"
    return [f"gradients agree, but {name} of {run.place(layer)} {value} ({run.cells_of(other for other, _ in keys)})"]
