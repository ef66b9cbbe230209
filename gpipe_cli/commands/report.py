"""``gpipe-report``: sets runs of gpipe-train beside each other, as the paper's table 2 does. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.bench.run_table import run_table
from gpipe_cli.bench.runs import find_runs
from gpipe_cli.bench.table_files import write_table
from gpipe_cli.terminal.frame import FAILED, REFUSED, answer
from gpipe_cli.terminal.output import show
from gpipe_cli.terminal.text import markdown_table, text_table

HELP = """\
gpipe-report: one table and one plot of several runs of gpipe-train.

    gpipe-train -m pipeline.K=1,2,4 pipeline.M=1,4,16
    gpipe-report sweeps/NAME

RUN ...      run directories, sweep directories (all their jobs), folders of either, or files inside a run
out=DIR      report.md, .json, .png and .svg go there; default: bench

Throughput is in units of the run with the smallest K, then M, among runs that differ in nothing else, with the ideal
K·M/(M+K-1) beside it, as in the paper's table 2. Runs that failed, are not finished or are damaged are named.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 when there is no run to show, 2 for a wrong call."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = answer(words, HELP, needs_words=True)
    if code is not None:
        return code
    out = [word.partition("=")[2] for word in words if word.startswith("out=")]
    paths = [Path(word) for word in words if not word.startswith("out=")]
    if wrong := [str(path) for path in paths if str(path).startswith("-")]:
        print(f"gpipe-report: there is no option {wrong[0]}; give runs and out=DIR (see --help)", file=sys.stderr)
        return REFUSED
    if not paths:
        print("gpipe-report: which runs? gpipe-report sweeps/NAME (see --help)", file=sys.stderr)
        return REFUSED
    runs, problems = find_runs(paths)
    for problem in problems:
        print(f"gpipe-report: {problem}", file=sys.stderr)
    if not runs:
        return FAILED
    table = run_table(runs)
    show(text_table(table.columns, table.rows) + "\n")
    for note in table.notes:
        show(f"* {note}")
    try:
        folder = Path(out[-1] if out else "bench")
        written = write_table(table, markdown_table(table.columns, table.rows), folder)
    except OSError as error:
        print(f"gpipe-report: {error}", file=sys.stderr)
        return FAILED
    show(f"\nwritten: {', '.join(str(path) for path in written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
