"""Draws a timeline, as text for a terminal and as a picture for a paper (after the paper's figure 2c)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from .instruction import COMPUTE, Op
from .simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange differ for every kind of colour blindness, and in lightness when printed in grey. A recompute is a
# pale forward, because it is the same work again. The first half of a backward has the backward's colour.
_STYLE = {  # name, colour of the bar, colour of the number on it
    Op.FORWARD: ("forward", "#2f6db3", "white"),
    Op.RECOMPUTE: ("recompute", "#a9cdee", "#173a63"),
    Op.BACKWARD: ("backward", "#f0a43a", "#4a2c00"),
    Op.INPUT_GRADIENT: ("input gradient", "#f0a43a", "#4a2c00"),
    Op.WEIGHT_GRADIENT: ("weight gradient", "#1c8f78", "white"),
}
_IDLE, _GRID, _TEXT = "#eceef1", "white", "#2b2f36"
_CHARACTERS = 0.64  # width of a digit as a share of the font's size
_SMALLEST = 5.0  # points; smaller numbers are left out


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, in inches, that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_text(timeline: Timeline, slot: float = 1.0) -> str:
    """Returns the timeline as a grid of characters: a row per worker, a column per slot of time.

    Each column shows the work in the middle of the slot: ``F0`` the forward of micro-batch 0, ``R0`` its
    recompute, ``B0`` its backward, ``I0`` and ``W0`` its halves, ``.`` nothing (see `legend`). A worker with several
    cells has a row for each of them.

    Args:
        timeline: of ``simulate``; with unit durations and a slot of 1 it is exact.
        slot: length of a column in the timeline's unit of time.
    """
    columns = max(1, round(timeline.span / slot))
    width = 1 + len(str(max(0, timeline.micro_batches - 1)))
    rows = _rows(timeline)
    margin = max(len(label) for label, _, _ in rows)
    lines = []
    for label, cell, worker in rows:
        grid = ["."] * columns
        for span in timeline.spans[worker]:
            if span.instruction.op in COMPUTE:
                own = span.instruction.cell == cell
                mark = f"{span.instruction.op.value}{span.instruction.micro_batch}" if own else ""
                for column in range(*_covered(span, slot)):
                    grid[column] = mark
        lines.append(f"{label:<{margin}} | " + " ".join(f"{mark:>{width}}" for mark in grid))
    return "\n".join(line.rstrip() for line in lines)


class Panel(NamedTuple):
    """Describes one timeline of a picture.

    Attributes:
        timeline: of ``simulate``, or measured.
        title: text before "K = …, M = …, bubble … %", such as the kind of schedule.
    """

    timeline: Timeline
    title: str = ""


def legend(timeline: Timeline) -> str:
    """Returns the meaning of those letters of `draw_text` that occur."""
    words = ", ".join(f"{op.value} {_STYLE[op][0]}" for op in _used(timeline))
    return f"{words}, with the micro-batch; . idle"


def save_picture(timeline: Timeline, path: str | Path, title: str = "", unit: str = "") -> None:
    """Draws the timeline into a file, in the format of its suffix (.png, .svg, .pdf).

    Args:
        timeline: of ``simulate``, or measured.
        path: the file to write.
        title: as in `Panel`.
        unit: of time, for the axis, such as "ms".
    """
    save_panels([Panel(timeline, title)], path, unit)


def save_panels(panels: Sequence[Panel], path: str | Path, unit: str = "") -> None:
    """Draws timelines below each other, on one scale of time, into a file as `save_picture` does."""

    tables = [_rows(panel.timeline) for panel in panels]
    # The width follows the numbers on the bars, the height the rows, within the limits of a page.
    bars = max(sum(s.instruction.op in COMPUTE for s in max(p.timeline.spans, key=len)) for p in panels)
    width = min(24.0, max(7.0, 1.6 + (0.1 + 0.06 * len(str(panels[0].timeline.micro_batches))) * bars))
    heights = [0.95 + max(0.12, min(0.42, 8 / len(rows))) * len(rows) for rows in tables]
    figure = new_figure(width, min(16.0 * len(panels), 0.4 + sum(heights)))
    column = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel, rows in zip(column, panels, tables, strict=True):
        axes.set_xlim(0, max(p.timeline.span for p in panels) or 1)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _draw_rows(axes, panel.timeline, rows)
        _draw_frame(axes, rows, unit)
        _draw_title(axes, panel)
    _draw_legend(figure, panels)
    for axes, panel, rows in zip(column, panels, tables, strict=True):
        _draw_numbers(figure, axes, panel.timeline, rows)
    figure.savefig(path, dpi=160)


def _rows(timeline: Timeline) -> list[tuple[str, int, int]]:
    """Returns (label, cell, worker) of each row, workers in order and their cells beneath them."""
    cells = range(len(timeline.placement))
    several = len(timeline.spans) < len(cells)
    return [
        (f"worker {worker} cell {cell}" if several else f"worker {worker}", cell, worker)
        for worker in range(len(timeline.spans))
        for cell in cells
        if timeline.placement[cell] == worker
    ]


def _used(timeline: Timeline) -> list[Op]:
    """Returns the kinds of computation that occur."""
    seen = {s.instruction.op for spans in timeline.spans for s in spans}
    return [op for op in COMPUTE if op in seen]


def _covered(span: Span, slot: float) -> tuple[int, int]:
    """Returns the first and the end column of those whose middle lies in the span."""
    return round(span.start / slot), round(span.end / slot)


def _draw_rows(axes: Axes, timeline: Timeline, rows: Sequence[tuple[str, int, int]]) -> None:
    for row, (_, cell, worker) in enumerate(rows):
        # Where the worker runs another of its cells, this cell's row is empty, but the worker is not idle.
        computed = [s for s in timeline.spans[worker] if s.instruction.op in COMPUTE]
        others = [(s.start, s.end - s.start) for s in computed if s.instruction.cell != cell]
        axes.broken_barh([(0, timeline.span)], (row - 0.42, 0.84), facecolor=_IDLE, linewidth=0)
        axes.broken_barh(others, (row - 0.42, 0.84), facecolor=_GRID, linewidth=0)
        for op in COMPUTE:
            own = (s for s in computed if s.instruction.cell == cell and s.instruction.op is op)
            bars = [(s.start, s.end - s.start) for s in own]
            # A white edge separates neighbours; with thousands of bars it would cover them.
            edge = min(0.8, 60 / (1 + len(bars)) ** 1.2)
            axes.broken_barh(bars, (row - 0.42, 0.84), facecolor=_STYLE[op][1], edgecolor=_GRID, linewidth=edge)


def _draw_frame(axes: Axes, rows: Sequence[tuple[str, int, int]], unit: str) -> None:
    step = -(-len(rows) // 40)
    axes.set_yticks(range(0, len(rows), step), [label for label, _, _ in rows[::step]])
    axes.tick_params(length=0, colors=_TEXT, labelsize=9)
    axes.set_xlabel(f"time ({unit})" if unit else "time", color=_TEXT, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_title(axes: Axes, panel: Panel) -> None:
    timeline = panel.timeline
    K, M = len(timeline.placement), timeline.micro_batches
    facts = f"K = {K}, M = {M}, bubble {100 * timeline.bubble:.1f} %"
    text = f"{panel.title}: {facts}" if panel.title else facts
    axes.set_title(text, loc="left", color=_TEXT, fontsize=11, fontweight="bold")


def _draw_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.patches import Patch

    used = {op for panel in panels for op in _used(panel.timeline)}
    handles = [Patch(facecolor=colour, label=name) for op, (name, colour, _) in _STYLE.items() if op in used]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    if any(len(panel.timeline.spans) < len(panel.timeline.placement) for panel in panels):
        handles.append(Patch(facecolor=_GRID, edgecolor=_TEXT, linewidth=0.5, label="works on another cell"))
    rows = -(-len(handles) // int(figure.get_figwidth() / 1.4))  # a narrow figure would cut a long row off
    columns = -(-len(handles) // rows)
    figure.legend(
        handles=handles, loc="outside lower right", ncols=columns, frameon=False, fontsize=9, labelcolor=_TEXT
    )


def _draw_numbers(figure: Figure, axes: Axes, timeline: Timeline, rows: Sequence[tuple[str, int, int]]) -> None:
    """Writes the micro-batches' numbers, in one size; none on bars that are too narrow to read them."""
    figure.draw_without_rendering()
    area, points = axes.get_window_extent(), 72 / figure.dpi
    tallest = min(9.0, 0.6 * area.height * points / len(rows))
    per_point = (axes.get_xlim()[1] - axes.get_xlim()[0]) / (area.width * points)
    widest = _CHARACTERS * (len(str(timeline.micro_batches - 1)) + 0.5) * per_point
    sizes = {}
    for op in COMPUTE:
        lengths = [s.end - s.start for spans in timeline.spans for s in spans if s.instruction.op is op]
        size = min(tallest, median(lengths) / widest) if lengths else 0.0
        if size >= _SMALLEST:
            sizes[op] = size
    size = min(sizes.values(), default=0.0)
    for row, (_, cell, worker) in enumerate(rows):
        for span in timeline.spans[worker]:
            # Measured bars of one kind differ; a number wider than its bar would be white on white.
            is_shown = span.instruction.cell == cell and span.instruction.op in sizes
            if is_shown and span.end - span.start >= 0.7 * size * widest:
                middle, text = (span.start + span.end) / 2, str(span.instruction.micro_batch)
                ink = _STYLE[span.instruction.op][2]
                axes.text(middle, row, text, ha="center", va="center_baseline", fontsize=size, color=ink)
