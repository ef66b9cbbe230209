"""Makes one table and plot of runs of gpipe-train, in the form of the paper's table 2. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.terminal.runs import FinishedRun
from gpipe_cli.terminal.text import percent

from ..paper import ideal_throughput
from .table import Curve, Table

GRID = ("pipeline.K", "pipeline.M", "pipeline.workers")  # the keys over which throughput is compared
NO_DIFFERENCE = ("name",)  # keys that do not make another experiment
NAMED = ("pipeline.schedule", "pipeline.remat")  # have columns of their own
SWEPT_COLUMNS_AT_MOST = 4
EVALUATION_COLUMNS_AT_MOST = 4  # the JSON file has all of them
Group = tuple[str, ...]


def run_table(runs: Sequence[FinishedRun]) -> Table:
    """Compares runs; throughput is in units of the smallest K, then M, among runs that differ in nothing else."""
    keys = differing_keys(runs)
    references: dict[Group, FinishedRun] = {}
    for run in sorted((run for run in runs if run.measured), key=lambda run: (run.K or 0, run.M or 0)):
        references.setdefault(_group(run, keys), run)
    shown = [key for key in keys if key not in NAMED]
    swept, hidden = shown[:SWEPT_COLUMNS_AT_MOST], shown[SWEPT_COLUMNS_AT_MOST:]
    scores = list(dict.fromkeys(name for run in runs for name in run.evaluation))[:EVALUATION_COLUMNS_AT_MOST]
    rows, facts = [], []
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for run, name in zip(runs, short_names(runs), strict=True):
        speed, ideal = _compared(run, references.get(_group(run, keys)))
        found = _facts(run, [*swept, *NAMED], speed, ideal)
        facts.append(found)
        shares = {"bubble": percent(run.bubble), "predicted": percent(run.bubble_predicted)}
        named = {"run": name, "schedule": run.settings.get(NAMED[0]), "remat": run.settings.get(NAMED[1])}
        speeds = {"examples/s": run.examples_per_second, "×": speed}
        rows.append(
            {**found, **found["settings"], **dict.fromkeys(scores), **run.evaluation, **named, **speeds, **shares}
        )
        if speed is not None and ideal is not None:
            others = [str(run.settings.get(key)) for key in [*swept, *NAMED] if key in keys]
            curves.setdefault(", ".join([f"M={run.M}", *others]), []).append((float(run.K or 0), speed, ideal))
    columns = ["run", *swept, "K", "M", "schedule", "remat", "loss", "examples/s", "×", "ideal", "bubble", "predicted"]
    formats = {title: ".2f" if title in ("×", "ideal") else "" for title in [*columns, *scores, "status"]}
    title = f"{len(runs)} runs of gpipe-train"
    return Table("report", title, formats, rows, _notes(runs, hidden), {"rows": facts}, _curves(curves))


def differing_keys(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns the configuration's keys whose values differ between the runs, except those of `GRID`.

    A value taken from another key (an interpolation, ``${...}``) makes no difference of its own.
    """
    known = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in known for key in run.settings)
    values = {key: {str(run.settings.get(key)) for run in known} for key in keys}
    return [
        key
        for key, found in values.items()
        if len(found) > 1 and key not in GRID + NO_DIFFERENCE and not any("${" in value for value in found)
    ]


def short_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns each folder's name; of a sweep's job its number, because its overrides stand in the columns."""
    jobs = [re.match(r"\d+(?=_|$)", run.folder.name) for run in runs]
    names = [run.folder.name if job is None else job[0] for run, job in zip(runs, jobs, strict=True)]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def _group(run: FinishedRun, keys: Sequence[str]) -> Group:
    return tuple(str(run.settings.get(key)) for key in keys)


def _compared(run: FinishedRun, reference: FinishedRun | None) -> tuple[float | None, float | None]:
    """Returns the measured and the ideal throughput in units of the reference; None where there is none.

    With W workers a pipeline of K cells cannot be faster than one of W cells.
    """
    if not run.measured or reference is None:
        return None, None
    assert run.examples_per_second and reference.examples_per_second
    assert run.K and run.M and reference.K and reference.M
    ideal = ideal_throughput(run.workers or run.K, run.M, (reference.workers or reference.K, reference.M))
    return run.examples_per_second / reference.examples_per_second, ideal


def _curves(panels: Mapping[str, Sequence[tuple[float, float, float]]]) -> list[Curve]:
    found = []
    for panel, points in panels.items():
        ordered = sorted(points)
        ideals = {K: ideal for K, _, ideal in ordered}
        found.append(Curve(panel, "ideal, K·M/(M+K−1)", "ideal", list(ideals.items())))
        found.append(Curve(panel, "measured", "ours", [(K, speed) for K, speed, _ in ordered]))
    return found


def _notes(runs: Sequence[FinishedRun], hidden: Sequence[str]) -> list[str]:
    said = [
        "×: examples/s in units of the run with the smallest K, then M, of those that differ in nothing else; ideal: "
        "K·M/(M+K−1) in the same unit, with the number of workers for K where cells share them.",
        "bubble: share of the workers' time without computing; predicted: simulated from the measured times.",
    ]
    if hidden:
        said.append(f"The runs also differ in {', '.join(hidden)}.")
    if unread := [run.folder.name for run in runs if not run.measured]:
        said.append(f"Without a speed: {', '.join(unread)}.")
    return said


def _facts(run: FinishedRun, keys: Sequence[str], speed: float | None, ideal: float | None) -> dict[str, Any]:
    names = ("K", "M", "workers", "loss", "examples_per_second", "bubble", "bubble_predicted", "evaluation")
    return {
        "run": str(run.folder),
        "settings": {key: run.settings.get(key) for key in keys},
        "normalised": speed,
        "ideal": ideal,
        **{name: getattr(run, name) for name in names},
        "status": run.outcome,
    }
