"""Draws pictures of a run: a step as measured, the loss, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..disk import json_lines
from ..schedule.picture import Panel, new_figure, save_panels
from ..schedule.simulate import Timeline
from .breakdown import mean_durations, simulate_with

if TYPE_CHECKING:
    from ..distributed.pipeline import Pipeline

# As in `schedule/picture.py`: blue forward, pale recompute; warm colours for lost time.
_COLOURS = ("#2f6db3", "#a9cdee", "#d9dce1", "#b9412f", "#8a8f99", "#4d9a6a")
MOST_POINTS = 10_000  # of a curve; a picture has fewer pixels


def draw_traced_step(step: int, measured: Timeline, pipeline: Pipeline, paths: Sequence[Path]) -> None:
    """Draws a measured step above the simulation of its schedule with the mean measured durations, in milliseconds."""
    lists = pipeline.training_lists(measured.micro_batches)
    simulated = simulate_with(lists, pipeline.placement, mean_durations(measured))
    panels = [
        Panel(measured, f"{pipeline.kind}, step {step} as measured"),
        Panel(simulated, "the schedule with the same durations"),
    ]
    for path in paths:
        save_panels(panels, path, "ms")


def draw_loss(run_dir: Path, path: Path) -> None:
    """Draws the training loss of every step, a smoothed curve, and the loss of every evaluation."""
    known = ((row["step"], row["loss"]) for row in _rows(run_dir / "metrics.jsonl", MOST_POINTS))
    trained = [(step, loss) for step, loss in known if loss is not None]
    steps, losses = [step for step, _ in trained], [loss for _, loss in trained]
    evaluations = list(_rows(run_dir / "evaluations.jsonl"))
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#a9cdee", linewidth=0.8)
    axes.plot(steps, _smooth(losses), color="#2f6db3", label="training")
    numbers = (name for row in evaluations for name, value in row.items() if isinstance(value, float))
    metric = next(numbers, None)  # the task's first metric is the loss
    points = [(row["step"], row[metric]) for row in evaluations if metric and row.get(metric) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color="#d9822b", label=f"evaluation ({metric})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def draw_breakdown(columns: Mapping[str, Mapping[str, float]], path: Path, title: str = "") -> None:
    """Draws a horizontal bar for each column, such as {"measured": …}; the file's suffix chooses the format."""
    figure = new_figure(9, 1.5 + 0.55 * len(columns))
    axes = figure.add_subplot()
    names = list(next(iter(columns.values())))
    for row, shares in enumerate(columns.values()):
        left = 0.0
        for name, colour in zip(names, _COLOURS, strict=True):
            width = 100 * shares[name]
            label = name.replace("_", " ") if row == 0 else None
            axes.barh(row, width, left=left, color=colour, edgecolor="white", label=label)
            if width >= 3.5:
                ink = "white" if colour in ("#2f6db3", "#b9412f", "#8a8f99", "#4d9a6a") else "#2b2f36"
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=9, color=ink)
            left += width
    axes.set_yticks(range(len(columns)), list(columns))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the workers' time")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _rows(path: Path, most: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Reads the rows of a JSON-lines file; of a long one about ``most`` rows, evenly spread."""
    if not path.exists():
        return
    with path.open("rb") as file:
        every = 1 if most is None else max(1, sum(1 for _ in file) // most)
        file.seek(0)
        yield from (row for _, row in json_lines(islice(file, 0, None, every)) if row is not None)


def _smooth(values: Sequence[float]) -> list[float]:
    """Returns the exponential moving average over about a fiftieth of the run."""
    keep = 1 - 1 / max(2.0, len(values) / 50)
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight if weight else math.nan)
    return smoothed
