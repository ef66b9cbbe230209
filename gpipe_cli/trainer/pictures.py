"""Pictures of a run: the pipeline's last step as it really went, and the loss."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..pipeline.picture import save_picture
from ..pipeline.simulate import Span, Timeline


def draw_step(spans: Sequence[Sequence[Span]], placement: Sequence[int], kind: str, path: Path) -> None:
    """The measured timeline of one step, one row a cell, in milliseconds.

    Args:
        spans: of each worker of one replica, on one clock.
        kind: of the schedule, for the title.
    """
    began = min(span.start for worker in spans for span in worker)
    shifted = [
        [Span(s.instruction, 1e3 * (s.start - began), 1e3 * (s.end - began)) for s in worker] for worker in spans
    ]
    save_picture(Timeline(shifted, tuple(placement)), path, f"{kind}, a measured step", "ms")


def draw_loss(run_dir: Path, path: Path) -> None:
    """Training loss of every step, smoothed, and the loss of every evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row for row in _rows(run_dir / "metrics.jsonl") if row["loss"] is not None]
    evaluations = _rows(run_dir / "evaluations.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row["step"] for row in steps], [row["loss"] for row in steps], color="#a9cdee", linewidth=0.8)
    axes.plot(
        [row["step"] for row in steps], _smooth([row["loss"] for row in steps]), color="#2f6db3", label="training"
    )
    metric = next((name for row in evaluations for name in row if name != "step"), None)
    points = [(row["step"], row[metric]) for row in evaluations if metric and row.get(metric) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color="#d9822b", label=f"evaluation ({metric})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the run."""
    keep = 1 - 1 / max(2.0, len(values) / 50)
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight if weight else math.nan)
    return smoothed
