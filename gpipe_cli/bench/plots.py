"""Draws a table's curves or bars, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.metrics.breakdown import draw_breakdown

from .tables import Curve, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange stay apart for every kind of colour blindness; what is only calculated is grey.
STYLES: dict[str, dict[str, Any]] = {
    "ours": {"color": "#2f6db3", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "paper": {"color": "#d9822b", "marker": "s", "linewidth": 1.6, "zorder": 4},
    "ideal": {"color": "#8a919c", "linestyle": ":", "linewidth": 1.4},
    "limit": {"color": "#8a919c", "linestyle": "--", "linewidth": 1.2, "marker": "x", "markersize": 5},
    "peer": {"color": "#7fa88b", "marker": ".", "linewidth": 1.0},
}
PEER_LINES = ("-", "--", ":", "-.")
COLUMNS_AT_MOST = 3


def draw(table: Table, folder: Path) -> list[Path]:
    """Writes ``NAME.png`` and ``NAME.svg``; nothing for a table without curves and bars."""
    paths = [folder / f"{table.name}.png", folder / f"{table.name}.svg"]
    if table.bars:
        for path in paths:
            draw_breakdown(table.bars, path, table.title)
        return paths
    if not table.curves:
        return []
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gpipe", "font.size": 9, "text.parse_math": False}):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        _draw_curves(figure, table)
        figure.suptitle(table.title, fontsize=11)
        for path in paths:
            figure.savefig(path, dpi=110)
    return paths


def _draw_curves(figure: Figure, table: Table) -> None:
    panels: dict[str, list[Curve]] = {}
    for curve in table.curves:
        panels.setdefault(curve.panel, []).append(curve)
    peers = list(dict.fromkeys(curve.label for curve in table.curves if curve.role == "peer"))
    columns = min(COLUMNS_AT_MOST, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(3.2 * columns + 0.6, 2.7 * rows + 0.9)
    grid = figure.subplots(rows, columns, squeeze=False)
    for place in range(rows * columns):
        axes = grid[place // columns][place % columns]
        if place >= len(panels):
            axes.set_axis_off()
            continue
        panel = list(panels)[place]
        _draw_panel(axes, panels[panel], peers, table.logarithmic)
        axes.set_title(panel, fontsize=9)
        if place // columns == rows - 1:
            axes.set_xlabel(table.axes[0])
        if place % columns == 0:
            axes.set_ylabel(table.axes[1])
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(
        lines.values(), [str(label) for label in lines], loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )


def _draw_panel(axes: Axes, curves: list[Curve], peers: list[str], logarithmic: bool) -> None:
    """``peers``: their labels in the whole figure, so that each has one kind of line in all panels."""
    for curve in curves:
        style = dict(STYLES[curve.role])
        if curve.role == "peer":
            style["linestyle"] = PEER_LINES[peers.index(curve.label) % len(PEER_LINES)]
        axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda y, _: f"{y / 1e9:g}B" if y >= 1e9 else f"{y / 1e6:g}M")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    else:
        axes.set_xticks(ticks)
        axes.set_ylim(0, 1.08 * max(y for curve in curves for _, y in curve.points))
    axes.grid(alpha=0.25)
