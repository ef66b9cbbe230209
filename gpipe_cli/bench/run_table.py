"""Runs of gpipe-train as one table and plot, in the form of the paper's table 2. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .paper import ideal_throughput
from .runs import Run
from .tables import Curve, Table, two_digits

GRID = ("pipeline.K", "pipeline.M", "pipeline.workers")  # what a table of throughput is about
NO_DIFFERENCE = ("name",)  # keys that do not make another experiment
SWEPT_COLUMNS_AT_MOST = 4
EVALUATION_COLUMNS_AT_MOST = 4  # the JSON file has all of them
Group = tuple[str, ...]


def run_table(runs: Sequence[Run]) -> Table:
    """All runs, with throughput in units of the one with the smallest K, then M, of those that differ in these only."""
    keys = differing_keys(runs)
    references = _references(runs, keys)
    shown = [key for key in keys if key not in ("pipeline.schedule", "pipeline.remat")][:SWEPT_COLUMNS_AT_MOST]
    names = list(dict.fromkeys(name for run in runs for name in run.evaluation))[:EVALUATION_COLUMNS_AT_MOST]
    columns = ["run", *shown, "K", "M", "schedule", "remat", "loss", "examples/s", "×", "ideal", "bubble", "predicted"]
    rows: list[list[object]] = []
    facts: list[dict[str, Any]] = []
    curves: dict[str, list[tuple[Run, float, float]]] = {}
    for run, name in zip(runs, short_names(runs), strict=True):
        reference = references.get(_group(run, keys)) if run.measured else None
        speed = None if reference is None else _quotient(run, reference)
        ideal = None if reference is None else _ideal(run, reference)
        settings = run.settings
        rows.append(
            [
                *(name, *(settings.get(key) for key in shown), run.K, run.M),
                *(settings.get("pipeline.schedule"), settings.get("pipeline.remat"), run.loss, run.examples_per_second),
                *(two_digits(speed), two_digits(ideal), _percent(run.bubble), _percent(run.bubble_predicted)),
                *(run.evaluation.get(metric) for metric in names),
                run.status,
            ]
        )
        facts.append(_facts(run, shown, speed, ideal))
        if speed is not None and ideal is not None:
            curves.setdefault(_panel(run, shown, keys), []).append((run, speed, ideal))
    return Table(
        "report",
        f"{len(runs)} runs of gpipe-train",
        [*columns, *names, "status"],
        rows,
        _notes(runs, keys, shown),
        {"rows": facts},
        _curves(curves),
    )


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Keys of the configuration, those of the grid aside, whose values are not the same in all runs.

    What is taken from another key (an interpolation, ``${...}``) makes no difference of its own.
    """
    known = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in known for key in run.settings)
    values = {key: {str(run.settings.get(key)) for run in known} for key in keys}
    return [
        key
        for key, found in values.items()
        if len(found) > 1 and key not in GRID + NO_DIFFERENCE and not any("${" in value for value in found)
    ]


def short_names(runs: Sequence[Run]) -> list[str]:
    """The folder's name; of a sweep's job its number, because what it overrides stands in the columns."""
    jobs = [re.match(r"\d+(?=_|$)", run.folder.name) for run in runs]
    names = [run.folder.name if job is None else job[0] for run, job in zip(runs, jobs, strict=True)]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def _group(run: Run, keys: Sequence[str]) -> Group:
    return tuple(str(run.settings.get(key)) for key in keys)


def _references(runs: Sequence[Run], keys: Sequence[str]) -> Mapping[Group, Run]:
    found: dict[Group, Run] = {}
    for run in sorted((run for run in runs if run.measured), key=lambda run: (run.K or 0, run.M or 0)):
        found.setdefault(_group(run, keys), run)
    return found


def _quotient(run: Run, reference: Run) -> float:
    assert run.examples_per_second and reference.examples_per_second
    return run.examples_per_second / reference.examples_per_second


def _ideal(run: Run, reference: Run) -> float:
    """With W workers a pipeline of K cells cannot be faster than one of W."""
    assert run.K and run.M and reference.K and reference.M
    return ideal_throughput(run.workers or run.K, run.M, (reference.workers or reference.K, reference.M))


def _panel(run: Run, shown: Sequence[str], keys: Sequence[str]) -> str:
    others = [key for key in dict.fromkeys([*shown, "pipeline.schedule", "pipeline.remat"]) if key in keys]
    return ", ".join([f"M={run.M}", *(str(run.settings.get(key)) for key in others)])


def _curves(panels: Mapping[str, Sequence[tuple[Run, float, float]]]) -> list[Curve]:
    found = []
    for panel, points in panels.items():
        ordered = sorted(points, key=lambda point: point[0].K or 0)
        ideals = {float(run.K or 0): ideal for run, _, ideal in ordered}
        found.append(Curve(panel, "ideal, K·M/(M+K−1)", "ideal", list(ideals.items())))
        found.append(Curve(panel, "measured", "ours", [(float(run.K or 0), speed) for run, speed, _ in ordered]))
    return found


def _notes(runs: Sequence[Run], keys: Sequence[str], shown: Sequence[str]) -> list[str]:
    said = [
        "×: examples/s in units of the run with the smallest K, then M, of those that differ in nothing else; ideal: "
        "K·M/(M+K−1) in the same unit, with the number of workers for K where cells share them.",
        "bubble: share of the workers' time without computing; predicted: simulated from the measured times.",
    ]
    hidden = [key for key in keys if key not in shown and key not in ("pipeline.schedule", "pipeline.remat")]
    if hidden:
        said.append(f"The runs also differ in {', '.join(hidden)}.")
    if unread := [run.folder.name for run in runs if not run.measured]:
        said.append(f"Without a speed: {', '.join(unread)}.")
    return said


def _facts(run: Run, shown: Sequence[str], speed: float | None, ideal: float | None) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "settings": {key: run.settings.get(key) for key in (*shown, "pipeline.schedule", "pipeline.remat")},
        "K": run.K,
        "M": run.M,
        "workers": run.workers,
        "loss": run.loss,
        "examples_per_second": run.examples_per_second,
        "normalised": speed,
        "ideal": ideal,
        "bubble": run.bubble,
        "bubble_predicted": run.bubble_predicted,
        "evaluation": dict(run.evaluation),
        "status": run.status,
    }


def _percent(share: float | None) -> str | None:
    return f"{100 * share:.1f} %" if isinstance(share, (int, float)) and math.isfinite(share) else None
