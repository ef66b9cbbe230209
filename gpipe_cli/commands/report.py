"""Implements ``gpipe-report``: sets runs of gpipe-train beside each other, as in the paper's table 2. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpipe_cli.bench.tables.table import Curve, Table
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.command import FAILED, run_command, show, to_stderr
from gpipe_cli.terminal.run_table import GRID, RunTable, compare
from gpipe_cli.terminal.runs import find_runs
from gpipe_cli.terminal.words import read_words

HELP = """\
gpipe-report: one table and one plot of several runs of gpipe-train.

    gpipe-train -m pipeline.K=1,2,4 pipeline.M=4,8,16
    gpipe-report sweeps/NAME

RUN ...      run directories, sweep directories (all their jobs), folders of either, or files inside a run
output=DIR   report.md, .json, .png and .svg go there; default: bench

Throughput is in units of the run with the smallest K, then M, among runs that differ in nothing else, with the ideal
K·M/(M+K-1) beside it, as in the paper's table 2. Runs that failed, are not finished or are damaged are named.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when there is no run to show, 2 for a wrong call."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command("gpipe-report", words, HELP, partial(_run, words), needs_words=True)


def _run(words: Sequence[str]) -> int:
    line = read_words(words, {"output": str}, overrides=False)
    if not line.runs:
        raise ConfigurationError("which runs? gpipe-report sweeps/NAME (see --help)")
    runs, problems = find_runs([Path(run) for run in line.runs])
    for problem in problems:
        to_stderr(f"gpipe-report: {problem}")
    if not runs:
        return FAILED
    found = compare(runs)
    title = f"{len(runs)} runs of gpipe-train"
    facts = {"rows": found.facts}
    table = Table("report", title, dict.fromkeys(found.columns, ""), found.rows, found.notes, facts, _curves(found))
    show(table.text() + "\n")
    for note in table.notes:
        show(f"* {note}")
    folder = Path(line.own.get("output", "bench"))
    try:
        written = table.write(folder)
    except OSError as error:
        raise ConfigurationError(f"output={folder}: {error.strerror}; name a directory that can be written") from error
    show(f"\nwritten: {', '.join(str(path) for path in written)}")
    return 0


def _curves(found: RunTable) -> list[Curve]:
    """Returns measured and ideal throughput over K, a panel for each M and setting that differs."""
    panels: dict[str, list[tuple[float, float, float]]] = {}
    for run in found.facts:
        if run["normalised"] is not None:
            others = [str(value) for key, value in run["settings"].items() if key not in GRID]
            point = (float(run["K"]), run["normalised"], run["ideal"])
            panels.setdefault(", ".join([f"M={run['M']}", *others]), []).append(point)
    curves = []
    for panel, points in panels.items():
        ideals = {K: ideal for K, _, ideal in sorted(points)}
        curves.append(Curve(panel, "ideal, K·M/(M+K−1)", "ideal", list(ideals.items())))
        curves.append(Curve(panel, "measured", "ours", [(K, speed) for K, speed, _ in sorted(points)]))
    return curves


if __name__ == "__main__":
    sys.exit(main())
