"""Draws pictures of a run: a step as measured, the loss, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..disk import json_lines
from ..schedule.picture import Panel, draw_panels
from ..schedule.simulate import Timeline
from ..svg import Curve, Drawing, plot
from .breakdown import mean_durations, simulate_with

if TYPE_CHECKING:
    from ..distributed.pipeline import Pipeline

# As in `schedule/picture.py`: blue forward, pale recompute; warm colours for lost time.
_COLOURS = (
    ("blue", "white"),
    ("pale", "ink"),
    ("light", "ink"),
    ("red", "white"),
    ("grey", "white"),
    ("leaf", "white"),
)
MOST_POINTS = 1_000  # of a curve; a picture has fewer pixels
WHOLE = 16 << 20  # bytes; a larger file is not read as a whole, because all workers wait


def draw_step(title: str, measured: Timeline, pipeline: Pipeline) -> Drawing:
    """Draws a measured step above the simulation of its schedule with the mean measured durations, in milliseconds."""
    lists = pipeline.training_lists(measured.micro_batches)
    simulated = simulate_with(lists, pipeline.placement, mean_durations(measured))
    return draw_panels([Panel(measured, title), Panel(simulated, "planned with the same durations")], "ms")


def draw_loss(run_dir: Path) -> Drawing:
    """Draws the training loss of every step, a smoothed curve, and the loss of every evaluation."""
    known = ((row["step"], row["loss"]) for row in _rows(run_dir / "metrics.jsonl", MOST_POINTS))
    trained = [(step, loss) for step, loss in known if loss is not None]
    evaluations = list(_rows(run_dir / "evaluations.jsonl"))
    numbers = (name for row in evaluations for name, value in row.items() if isinstance(value, float))
    metric = next(numbers, None)  # the task's first metric is the loss
    points = [(row["step"], row[metric]) for row in evaluations if metric and row.get(metric) is not None]
    smoothed = zip((step for step, _ in trained), _smooth([loss for _, loss in trained]), strict=True)
    curves = [
        Curve("", "training, each step", "raw", trained),
        Curve("", "training, smoothed", "smooth", list(smoothed)),
        *([Curve("", f"evaluation ({metric})", "paper", points)] * bool(points)),
    ]
    return plot(curves, ("step", "loss"), "Loss over the steps", from_zero=False)


def draw_breakdown(columns: Mapping[str, Mapping[str, float]], title: str = "Where a step goes") -> Drawing:
    """Draws a horizontal bar for each column, such as {"measured": …}: shares of the workers' time in percent."""
    names = [name.replace("_", " ") for name in next(iter(columns.values()))]
    margin = 16 + 6.6 * max(map(len, columns))
    scale = (700 - margin - 12) / 100
    said = (
        f"{title}, {column}: " + ", ".join(f"{k} {v:.1%}" for k, v in row.items()) for column, row in columns.items()
    )
    drawing = Drawing(700, 78 + 34 * len(columns), "; ".join(said).replace("_", " "))
    drawing.text(8, 14, f"{title}, % of the workers' time", size=13, bold=True)
    for row, (column, shares) in enumerate(columns.items()):
        left, y = margin, 30.0 + 34 * row
        drawing.text(margin - 8, y + 13, column, "end")
        for share, (colour, ink) in zip(shares.values(), _COLOURS, strict=True):
            width = 100 * share * scale
            drawing.bars([(left, y, max(0.0, width - 0.7), 26)], colour)
            if width >= 28:
                drawing.text(left + width / 2, y + 13, f"{100 * share:.1f}", "middle", 11, ink)
            left += width
    drawing.legend(list(zip(names, (colour for colour, _ in _COLOURS), strict=True)), 44.0 + 34 * len(columns))
    return drawing


def _rows(path: Path, most: int = 0) -> Iterator[Mapping[str, Any]]:
    """Reads the rows of a JSON-lines file; of a long one about ``most`` rows, evenly spread, if that is given."""
    if not path.exists():
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        if not most or size <= WHOLE:
            rows = [row for _, row in json_lines(file) if row is not None]
            yield from rows[:: max(1, len(rows) // (most or len(rows) or 1))]
            return
        for number in range(most):
            file.seek(number * size // most)
            file.readline()  # the rest of a line
            yield from (row for _, row in json_lines([file.readline()]) if row is not None)


def _smooth(values: Sequence[float]) -> list[float]:
    """Returns the exponential moving average over about a fiftieth of the run."""
    keep = 1 - 1 / max(2.0, len(values) / 50)
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight if weight else math.nan)
    return smoothed
