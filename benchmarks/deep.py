"""Draws a sweep over `experiment=nmt_small/very_deep`: gradient norms and losses of a very deep, narrow Transformer.

    gpipe-train -m experiment=nmt_small/very_deep model.depth_scaled_init=true,false task.logit_clip=null,5
    python -m benchmarks.deep sweeps/NAME --picture deep.png

Takes run directories in place of a sweep's folder, too. A curve is named by depth_scaled_init and logit_clip of the
run's configuration. docs/translation.md describes the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import Row, parser, report
from gpipe_cli.metrics.language_pictures import trailing_average
from gpipe_cli.schedule.picture import new_figure
from gpipe_cli.terminal.runs import FinishedRun, find_runs

COLOURS = {True: "#2f6db3", False: "#d9822b"}  # with depth-scaled initialisation, and without
STYLES = ("-", "--", ":")  # by value of logit clipping, in the order of the runs
SMOOTH = 20  # steps behind a curve's point; mini-batches differ much in length
LAST = 50  # steps that the table averages over
COLUMNS = {"run": "", "first gradient norm": ".2f", "largest": ".2f", f"mean of the last {LAST}": ".2f"}
COLUMNS |= {f"loss, mean of the last {LAST}": ".3f", "largest share of logits clipped": ".2%", "skipped updates": ""}


def kind(run: FinishedRun) -> tuple[bool, float | None]:
    """Returns whether feed-forward weights began smaller, and where logits were clipped (None: nowhere)."""
    return run.settings["model.depth_scaled_init"], run.settings["task.logit_clip"]


def name(run: FinishedRun) -> str:
    scaled, clip = kind(run)
    said = "no clipping" if clip is None else f"logits clipped at {clip:g}"
    return f"{'depth-scaled' if scaled else 'plain'} initialisation, {said}"


def steps_of(run: FinishedRun) -> list[dict[str, Any]]:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def draw(runs: Sequence[FinishedRun], path: Path) -> None:
    """Draws loss and gradient norm of every step, faint, and their means over the last `SMOOTH` steps."""
    figure = new_figure(11, 4.4)
    clips = list(dict.fromkeys(kind(run)[1] for run in runs))
    panels = figure.subplots(1, 2)
    for axes, key, label in zip(panels, ("loss", "grad_norm"), ("loss", "gradient norm, not clipped"), strict=True):
        for run in runs:
            steps, values = zip(
                *((row["step"], row[key]) for row in steps_of(run) if row[key] is not None), strict=True
            )
            scaled, clip = kind(run)
            axes.plot(steps, values, color=COLOURS[scaled], linewidth=0.6, alpha=0.25)
            style = {"color": COLOURS[scaled], "linestyle": STYLES[clips.index(clip) % len(STYLES)]}
            axes.plot(steps, trailing_average(values, SMOOTH), linewidth=1.6, label=name(run), **style)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def row(run: FinishedRun) -> Row:
    """Returns the figures of one run's curves."""
    steps = steps_of(run)
    norms = [step["grad_norm"] for step in steps if step["grad_norm"] is not None]
    losses = [step["loss"] for step in steps[-LAST:] if step["loss"] is not None]
    clipped = max(step.get("clipped_logits_share", 0.0) for step in steps)
    figures = (name(run), norms[0], max(norms), fmean(norms[-LAST:]), fmean(losses), clipped)
    return dict(zip(COLUMNS, (*figures, steps[-1]["skipped_updates"]), strict=True))


def main(words: Sequence[str]) -> None:
    options = parser(__doc__)
    options.add_argument("folders", nargs="+", type=Path, help="of a sweep, or of runs")
    options.add_argument("--picture", type=Path, default=Path("deep.png"))
    given = options.parse_args(words)
    runs, problems = find_runs(given.folders)
    if problems:
        options.error("; ".join(problems))
    runs.sort(key=lambda run: (not kind(run)[0], kind(run)[1] or 0.0))
    report(COLUMNS, map(row, runs), given.output)
    draw(runs, given.picture)


if __name__ == "__main__":
    main(sys.argv[1:])
