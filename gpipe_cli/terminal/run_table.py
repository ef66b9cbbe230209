"""Compares runs of gpipe-train in one table: the jobs of a sweep, and any runs for gpipe-report."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpipe_cli.svg import Curve, Drawing, plot
from gpipe_cli.terminal.document import Document, Grid, Lines, Link, Picture
from gpipe_cli.terminal.runs import FinishedRun
from gpipe_cli.terminal.text import percent

GRID = ("pipeline.K", "pipeline.M")  # have columns of their own
NO_DIFFERENCE = ("name", "pipeline.workers")  # keys that do not make another experiment
FIGURES = ("K", "M", "workers", "loss", "examples_per_second", "bubble", "bubble_predicted", "wall_seconds")
SETTINGS_AT_MOST = EVALUATIONS_AT_MOST = 4  # columns; `facts` has all
NAMED_AT_MOST = 8  # keys that differ, in a note
NOTES = (
    "×: examples/s in units of the run with the smallest K, then M, of those that differ in nothing else; ideal: "
    "K·M/(M+K−1) in the same unit, with the number of workers for K where cells share them.",
    "bubble: share of the workers' time without computing; predicted: simulated from the measured times.",
)


@dataclass(frozen=True)
class RunTable:
    """Holds figures of runs.

    Attributes:
        facts: of each run: its directory, settings that differ, and figures in full precision.
        differing: keys of the configuration whose values differ.
    """

    facts: list[dict[str, Any]]
    differing: list[str]

    def document(self, folder: Path) -> Document:
        """Returns the table, with links to the runs' own pages, the plot and what the columns mean.

        Args:
            folder: in which the page will lie.
        """
        others = [key for key in self.differing if key not in GRID]
        settings, hidden = others[:SETTINGS_AT_MOST], others[SETTINGS_AT_MOST:]
        scores = list(dict.fromkeys(name for run in self.facts for name in run["evaluation"]))[:EVALUATIONS_AT_MOST]
        columns = ["run", *settings, "K", "M", "loss", "examples/s", "×", "ideal", "bubble", "predicted", *scores]
        rows: list[list[object]] = []
        for run in self.facts:
            page, name = Path(run["run"]) / "report.html", run["name"]
            row = [Link(name, quote(os.path.relpath(page, folder))) if page.is_file() else name]
            row += [run["settings"][key] for key in settings]
            row += [run[key] for key in ("K", "M", "loss", "examples_per_second")]
            row += [run[key] and f"{run[key]:.2f}" for key in ("normalised", "ideal")]
            row += [percent(run[key]) for key in ("bubble", "bubble_predicted")]
            rows.append([*row, *(run["evaluation"].get(score) for score in scores), run["outcome"]])
        drawing = self.drawing()
        plots = [] if drawing is None else [Picture(str(drawing), drawing.alt, "report.svg")]
        more = f" and {len(hidden) - NAMED_AT_MOST} more keys" if len(hidden) > NAMED_AT_MOST else ""
        differ = [f"The runs also differ in {', '.join(hidden[:NAMED_AT_MOST])}{more}."] if hidden else []
        notes = Lines([*NOTES, *differ], "* ")
        return Document(f"{len(rows)} runs of gpipe-train", [Grid([*columns, "status"], rows), *plots, notes])

    def drawing(self) -> Drawing | None:
        """Returns measured and ideal throughput over K, a panel for each M and setting that differs; None without."""
        panels: dict[str, list[tuple[float, float, float]]] = {}
        for run in self.facts:
            if run["normalised"] is not None:
                others = [str(value) for key, value in run["settings"].items() if key not in GRID]
                point = (float(run["K"]), run["normalised"], run["ideal"])
                panels.setdefault(", ".join([f"M={run['M']}", *others]), []).append(point)
        curves = []
        for panel, points in panels.items():
            ideals = {K: ideal for K, _, ideal in sorted(points)}
            curves.append(Curve(panel, "ideal, K·M/(M+K−1)", "ideal", list(ideals.items())))
            curves.append(Curve(panel, "measured", "ours", [(K, speed) for K, speed, _ in sorted(points)]))
        return plot(curves, ("cells K", "normalised throughput"), "Throughput of the runs") if curves else None


def compare(runs: Sequence[FinishedRun]) -> RunTable:
    """Compares runs; × is examples/s in units of the smallest K, then M, among runs that differ in nothing else."""
    differing = differing_keys(runs)
    others = [key for key in differing if key not in GRID]
    references: dict[tuple[str, ...], FinishedRun] = {}
    for run in sorted(filter(_speed, runs), key=lambda run: (run.summary["K"], run.summary["M"])):
        references.setdefault(_group(run, others), run)
    facts = []
    for run, name in zip(runs, short_names(runs), strict=True):
        speed, ideal = _compared(run, references.get(_group(run, others)))
        about: dict[str, Any] = {
            "run": str(run.folder),
            "name": name,
            "settings": {key: _value(run, key) for key in differing},
        }
        about |= {"status": run.status, "error": run.error, "outcome": run.outcome, "evaluation": run.evaluation}
        figures = {name: run.summary.get(name) for name in FIGURES}
        facts.append({**about, **figures, "normalised": speed, "ideal": ideal})
    return RunTable(facts, differing)


def differing_keys(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns the configuration's keys whose values differ between the runs.

    A value taken from another key (an interpolation, ``${...}``) makes no difference of its own. Where each run has
    typed its option of a group, the option stands for all keys of the group that were not typed.
    """
    known = [run for run in runs if run.settings]
    of_all = [key for key in (known[0].typed if known else ()) if all(key in run.typed for run in known)]
    values = {key: {str(_value(run, key)) for run in known} for run in known for key in (*of_all, *run.settings)}
    differing = [key for key, found in values.items() if len(found) > 1 and not any("${" in value for value in found)]
    groups = tuple(f"{key}." for key in differing)
    return [key for key in differing if key not in NO_DIFFERENCE and (key in of_all or not key.startswith(groups))]


def short_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns each folder's name; of a sweep's job its number, because its overrides stand in the columns."""
    jobs = [re.match(r"\d+(?=_|$)", run.folder.name) for run in runs]
    names = [run.folder.name if job is None else job[0] for run, job in zip(runs, jobs, strict=True)]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def ideal_throughput(K: int, M: int, reference: tuple[int, int] = (2, 1)) -> float:
    """Returns K·M / (M+K-1), K equal cells against one device, messages free, in units of the reference's (K, M)."""
    speed, unit = (cells * count / (count + cells - 1) for cells, count in ((K, M), reference))
    return speed / unit


def _group(run: FinishedRun, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(_value(run, key)) for key in keys)


def _value(run: FinishedRun, key: str) -> Any:
    return run.settings.get(key, run.typed.get(key))


def _compared(run: FinishedRun, reference: FinishedRun | None) -> tuple[float | None, float | None]:
    """Returns the measured and the ideal throughput in units of the reference; None where there is none.

    With W workers a pipeline of K cells cannot be faster than one of W cells.
    """
    speed, unit = _speed(run), reference and _speed(reference)
    if reference is None or not speed or not unit:
        return None, None
    width, reference_width = (each.summary.get("workers") or each.summary["K"] for each in (run, reference))
    return speed / unit, ideal_throughput(width, run.summary["M"], (reference_width, reference.summary["M"]))


def _speed(run: FinishedRun) -> float | None:
    """Returns the examples per second of a run that can be compared."""
    known = run.summary.get("K") is not None and run.summary.get("M") is not None
    return run.summary.get("examples_per_second") if known else None
