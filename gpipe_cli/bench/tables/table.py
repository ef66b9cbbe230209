"""Holds a table of figures with its notes and curves, and writes it as Markdown, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.metrics.pictures import draw_breakdown
from gpipe_cli.schedule.picture import new_figure
from gpipe_cli.terminal.text import markdown_table, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Say = Callable[[str], None]  # reports to the user what is being measured
THROUGHPUT_AXES = ("cells K", "normalised throughput")
# Blue and orange stay apart for every kind of colour blindness; what is only calculated is grey.
STYLES: dict[str, dict[str, Any]] = {
    "ours": {"color": "#2f6db3", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "paper": {"color": "#d9822b", "marker": "s", "linewidth": 1.6, "zorder": 4},
    "ideal": {"color": "#8a919c", "linestyle": ":", "linewidth": 1.4},
    "limit": {"color": "#8a919c", "linestyle": "--", "linewidth": 1.2, "marker": "x", "markersize": 5},
    "peer": {"linewidth": 1.0, "markersize": 5},
}
PEER_STYLES = (("-", "v", "#3c7a52"), ("--", "^", "#7fa88b"), (":", "D", "#5b6f7f"), ("-.", "P", "#9a7fb0"))
COLUMNS_AT_MOST = 3


@dataclass(frozen=True)
class Curve:
    """Describes one line of a plot.

    Attributes:
        panel: title of the panel that it stands in.
        role: "paper", "ours", "ideal", "limit" or "peer": how it is drawn.
        points: (x, y).
    """

    panel: str
    label: str
    role: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """Holds what one command measured.

    Attributes:
        name: of the files, as "table2".
        columns: title of each column to the format of its values, e.g. ``{"ours": ".2f", "remat": ""}``.
        rows: values by title; further keys are for the JSON file only.
        notes: the protocol and what is remarkable, a sentence or two each.
        facts: entries of the JSON file: everything measured, in full precision; None: the rows.
        curves: of the plot.
        bars: in place of curves, shares of a step: column to name to share.
        axes: names of the curves' axes.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    facts: Mapping[str, Any] | None = None
    curves: Sequence[Curve] = ()
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    axes: tuple[str, str] = THROUGHPUT_AXES
    logarithmic: bool = False

    def text(self) -> str:
        """Returns the columns and rows, aligned."""
        return text_table(list(self.columns), [cells(self.columns, row) for row in self.rows])

    def write(self, folder: Path, where: str = "", about: Mapping[str, Any] | None = None) -> list[Path]:
        """Writes ``NAME.md``, ``NAME.json`` and the plot's ``NAME.png`` and ``NAME.svg``; returns the files.

        Args:
            where: the last line of the Markdown: the machine that the figures are from.
            about: entries of the JSON file in front of the notes and `facts`.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text, figures = folder / f"{self.name}.md", folder / f"{self.name}.json"
        notes = "\n".join(f"* {note}" for note in self.notes)
        paragraphs = [f"# {self.title}", markdown(self.columns, self.rows), notes, where]
        text.write_text("\n\n".join(filter(None, paragraphs)) + "\n", encoding="utf-8")
        facts = {"rows": self.rows} if self.facts is None else self.facts
        content = {**(about or {}), "notes": list(self.notes), **facts}
        figures.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return [text, figures, *draw(self, folder)]


def cells(columns: Mapping[str, str], row: Mapping[str, Any]) -> list[object]:
    """Returns the values of a row as they are printed; None stays None, which prints as a dash."""
    values = ((row.get(title), form) for title, form in columns.items())
    return [value if value is None or not form else format(value, form) for value, form in values]


def markdown(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns columns and rows as a Markdown table."""
    return markdown_table(list(columns), [cells(columns, row) for row in rows])


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

    panels: dict[str, list[Curve]] = {}
    for curve in table.curves:
        panels.setdefault(curve.panel, []).append(curve)
    columns = min(COLUMNS_AT_MOST, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context({"svg.hashsalt": "gpipe", "font.size": 9, "text.parse_math": False}):
        figure = new_figure(3.2 * columns + 0.6, 2.7 * rows + 0.9)
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for place, axes in enumerate(grid):
            if place >= len(panels):
                axes.set_axis_off()
                continue
            _draw_panel(axes, table, list(panels.values())[place])
            if place // columns == rows - 1:
                axes.set_xlabel(table.axes[0])
            if place % columns == 0:
                axes.set_ylabel(table.axes[1])
        lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
        names, style = list(lines), {"ncols": 4, "frameon": False, "fontsize": 8}
        figure.legend(lines.values(), names, loc="outside lower center", **style)
        figure.suptitle(table.title, fontsize=11)
        for path in paths:
            figure.savefig(path, dpi=110)
    return paths


def _draw_panel(axes: Axes, table: Table, curves: Sequence[Curve]) -> None:
    """Draws curves; each peer has one kind of line, marker and colour in all panels of the table."""
    peers = list(dict.fromkeys(curve.label for curve in table.curves if curve.role == "peer"))
    from matplotlib.ticker import LogLocator

    for curve in curves:
        style = dict(STYLES[curve.role])
        if curve.role == "peer":
            own = PEER_STYLES[peers.index(curve.label) % len(PEER_STYLES)]
            style |= dict(zip(("linestyle", "marker", "color"), own, strict=True))
        axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    if table.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda y, _: f"{y / 1e9:g}B" if y >= 1e9 else f"{y / 1e6:g}M")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    else:
        axes.set_xticks(ticks)
        axes.set_ylim(0, 1.08 * max(y for curve in curves for _, y in curve.points))
    axes.set_title(curves[0].panel, fontsize=9)
    axes.grid(alpha=0.25)
