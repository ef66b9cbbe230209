"""Draws a sweep over `experiment=nmt_small/very_deep`: gradient norms and losses of a very deep, narrow Transformer.

    gpipe-train -m experiment=nmt_small/very_deep model.depth_scaled_init=true,false task.logit_clip=null,5
    python -m benchmarks.deep sweeps/NAME output=deep.png

Takes run directories in place of a sweep's folder, too: `python -m benchmarks.deep RUN1 RUN2`. A curve is named by
depth_scaled_init and logit_clip of the run's configuration. docs/translation.md describes the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli.bench.tables.table import markdown

COLOURS = {True: "#2f6db3", False: "#d9822b"}  # with depth-scaled initialisation, and without
STYLES = ("-", "--", ":")  # by value of logit clipping, in the order of the runs
SMOOTH = 20  # steps behind a curve's point; mini-batches differ much in length
LAST = 50  # steps that the table averages over
COLUMNS = {"run": "", "first gradient norm": ".2f", "largest": ".2f", f"mean of the last {LAST}": ".2f"}
COLUMNS |= {f"loss, mean of the last {LAST}": ".3f", "largest share of logits clipped": "", "skipped updates": ""}


@dataclass(frozen=True)
class DeepRun:
    """Holds one run.

    Attributes:
        scaled: feed-forward weights began smaller.
        clip: the value at which logits were clipped; None: not clipped.
        rows: lines of metrics.jsonl.
    """

    scaled: bool
    clip: float | None
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        clip = "no clipping" if self.clip is None else f"logits clipped at {self.clip:g}"
        return f"{'depth-scaled' if self.scaled else 'plain'} initialisation, {clip}"


def read(folder: Path) -> DeepRun:
    """Reads a run directory."""
    config = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return DeepRun(
        config["model"]["depth_scaled_init"], config["task"]["logit_clip"], [json.loads(line) for line in lines]
    )


def draw(runs: Sequence[DeepRun], path: Path) -> None:
    """Draws loss and gradient norm of every step, faint, and their means over the last `SMOOTH` steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    clips = list(dict.fromkeys(run.clip for run in runs))
    panels = figure.subplots(1, 2)
    for axes, key, label in zip(panels, ("loss", "grad_norm"), ("loss", "gradient norm, not clipped"), strict=True):
        for run in runs:
            points = [(row["step"], row[key]) for row in run.rows if row[key] is not None]
            style = STYLES[clips.index(run.clip) % len(STYLES)]
            steps, values = zip(*points, strict=True)
            smooth = [fmean(values[max(0, last - SMOOTH + 1) : last + 1]) for last in range(len(values))]
            axes.plot(steps, values, color=COLOURS[run.scaled], linewidth=0.6, alpha=0.25)
            axes.plot(steps, smooth, style, color=COLOURS[run.scaled], linewidth=1.6, label=run.name)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def row(run: DeepRun) -> dict[str, Any]:
    """Returns the figures of one run's curves."""
    norms = [row["grad_norm"] for row in run.rows if row["grad_norm"] is not None]
    losses = [row["loss"] for row in run.rows[-LAST:] if row["loss"] is not None]
    clipped = max(row.get("clipped_logits_share", 0.0) for row in run.rows)
    figures = (run.name, norms[0], max(norms), fmean(norms[-LAST:]), fmean(losses), f"{100 * clipped:.2g} %")
    return dict(zip(COLUMNS, (*figures, run.rows[-1]["skipped_updates"]), strict=True))


def main(words: Sequence[str]) -> int:
    output = next((Path(word.partition("=")[2]) for word in words if word.startswith("output=")), Path("deep.png"))
    given = [Path(word) for word in words if not word.startswith("output=")]
    folders = [run for folder in given for run in ([folder] if (folder / "metrics.jsonl").is_file() else _jobs(folder))]
    if not folders:
        print(f"{' '.join(map(str, given)) or 'no folder'}: no run in it; use python -m benchmarks.deep sweeps/NAME")
        return 2
    runs = sorted(map(read, folders), key=lambda run: (not run.scaled, run.clip or 0.0))
    print(markdown(COLUMNS, [row(run) for run in runs]))
    draw(runs, output)
    print(f"picture: {output}")
    return 0


def _jobs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
