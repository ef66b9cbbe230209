"""Draws a table's curves or bars, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .tables import Bar, Curve, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange stay apart for every kind of colour blindness; what is only calculated is grey.
STYLES = {
    "ours": {"color": "#2f6db3", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "paper": {"color": "#d9822b", "marker": "s", "linewidth": 1.6, "zorder": 4},
    "ideal": {"color": "#8a919c", "linestyle": ":", "linewidth": 1.4},
    "limit": {"color": "#8a919c", "linestyle": "--", "linewidth": 1.2},
    "peer": {"color": "#7fa88b", "marker": ".", "linewidth": 1.0},
}
COLUMNS_AT_MOST = 3
BAR_COLORS = ("#2f6db3", "#a9cdee", "#d5d8dd", "#f0a43a", "#9a6fb0", "#7fa88b", "#c0504d", "#444444")


def draw(table: Table, folder: Path) -> list[Path]:
    """Writes ``NAME.png`` and ``NAME.svg``; nothing for a table without curves and bars."""
    if not (table.curves or table.bars):
        return []
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gpipe", "font.size": 9}):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        if table.bars:
            _draw_bars(figure, table.bars)
        else:
            _draw_curves(figure, table)
        figure.suptitle(table.title, fontsize=11)
        paths = [folder / f"{table.name}.png", folder / f"{table.name}.svg"]
        for path in paths:
            figure.savefig(path, dpi=110)
    return paths


def _draw_curves(figure: Figure, table: Table) -> None:
    panels: dict[str, list[Curve]] = {}
    for curve in table.curves:
        panels.setdefault(curve.panel, []).append(curve)
    columns = min(COLUMNS_AT_MOST, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(3.6 * columns + 0.4, 3.0 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False)
    for place in range(rows * columns):
        axes = grid[place // columns][place % columns]
        if place >= len(panels):
            axes.set_axis_off()
            continue
        panel = list(panels)[place]
        _draw_panel(axes, panels[panel])
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel(table.axes[0])
        axes.set_ylabel(table.axes[1])


def _draw_panel(axes: Axes, curves: list[Curve]) -> None:
    peers = 0
    for curve in curves:
        style = dict(STYLES[curve.role])
        if curve.role == "peer":
            style["linestyle"] = ("-", "--", ":")[peers % 3]
            peers += 1
        axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)
    axes.set_xticks(sorted({x for curve in curves for x, _ in curve.points}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=7)


def _draw_bars(figure: Figure, bars: tuple[Bar, ...] | list[Bar]) -> None:
    figure.set_size_inches(8.5, 0.8 * len(bars) + 1.6)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for bar in bars for name in bar.shares))
    left = [0.0] * len(bars)
    for number, name in enumerate(names):
        widths = [100 * bar.shares.get(name, 0.0) for bar in bars]
        color = BAR_COLORS[number % len(BAR_COLORS)]
        drawn = axes.barh(range(len(bars)), widths, left=left, height=0.6, color=color, label=name, edgecolor="white")
        texts = [f"{width:.0f}" if width >= 3 else "" for width in widths]
        axes.bar_label(drawn, texts, label_type="center", fontsize=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("% of a step")
    axes.legend(frameon=False, fontsize=8, ncols=min(4, len(names)), loc="upper center", bbox_to_anchor=(0.5, -0.35))
    axes.spines[["top", "right", "left"]].set_visible(False)
