"""gpipe-verify: runs a few steps of a configuration as gpipe-train would (its workers, K, M, schedule), the same steps
in one process by a plain loop without the engine, and compares: loss, outputs of layers, every gradient by name,
clipping, learning rate, optimizer state, weights.

    gpipe-verify model=transformer pipeline.K=4 pipeline.M=8
    gpipe-verify debug=tiny pipeline.schedule=1f1b          with a model and data made small: seconds
    gpipe-verify model._target_=my_module.my_layers         your own layers
    gpipe-verify -m pipeline.K=1,2,4 pipeline.remat=always,never

It takes every key of gpipe-train, and

    verify.steps=2          how many mini-batches, from the first on
    verify.dtype=float64    both sides in float64: separates rounding from errors
    verify.format=json      one JSON object on standard output; everything else goes to standard error

Exit code: 0 the same, 1 different (or the run failed), 2 refused. More: docs/verifying.md.
"""  # --help prints this

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.disk import write_whole
from gpipe_cli.terminal.command import FAILED
from gpipe_cli.terminal.runs import ERROR_FILE
from gpipe_cli.terminal.text import text_table

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    from gpipe_cli.commands import train
    from gpipe_cli.jobs.job import EntryPoint

    program = EntryPoint("gpipe_cli.verify.run:main", conclude=conclude, config_name="verify")
    with redirect_stdout(sys.stdout):  # puts it back: verify.format=json changes it
        return train.main(arguments, program, __doc__)


def conclude(report: Any, run_dir: Path, console: Console) -> int:
    """Prints the report, writes summary.json and error.txt for a sweep's table, and returns the exit code.

    Args:
        report: rank 0's, see `verify.compare.report_of`; None on other ranks.
    """
    if report is None:
        return 0
    if report["format"] == "json":
        print(json.dumps(report, indent=1), file=sys.__stdout__, flush=True)
    for line in as_text(report):
        console.say(line)
    evaluation = {f"{name}, largest difference": largest(report, name) for name in ("gradients", "weights after")}
    summary = {"loss": report["loss"], "evaluation": evaluation, "stopped_by": "steps"}
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    if not report["agrees"]:
        write_whole(run_dir / ERROR_FILE, f"{[*report['findings'], report['verdict']][0]}\n")
    return 0 if report["agrees"] else FAILED


def largest(report: dict[str, Any], name: str) -> float | None:
    """Returns the largest relative difference of a quantity over all steps; None if it is missing or not finite."""
    found = [q["relative"] for step in report["steps"] for q in step["quantities"] if q["name"] == name]
    return None if None in found else max(found, default=None)


def as_text(report: dict[str, Any]) -> list[str]:
    """Returns one table of all steps, with the worst of each quantity, the findings, and the verdict."""
    columns = ["", "compared", "largest difference", "relative", "where", "verdict"]
    every = [(step["step"], quantity) for step in report["steps"] for quantity in step["quantities"]]
    rows = []
    for name in dict.fromkeys(q["name"] for _, q in every):
        found = [(number, q) for number, q in every if q["name"] == name]
        number, q = max(
            found, key=lambda one: (one[1]["beyond"] > 0, one[1]["relative"] is None, one[1]["relative"] or 0)
        )
        where = f"step {number}: {q['where']}" if q["absolute"] != 0 or q["relative"] != 0 else ""
        count = sum(one["compared"] for _, one in found)
        rows.append([name, count, _size(q["absolute"]), _size(q["relative"]), where, q["verdict"]])
    steps = ", ".join(str(step["step"]) for step in report["steps"])
    head = f"steps {steps}" if steps else ""
    return ["", head, text_table(columns, rows), "", *report["notes"], *report["findings"], report["verdict"]]


def _size(value: float | None) -> str:
    return "inf" if value is None else "0" if value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
