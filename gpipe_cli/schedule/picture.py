"""Draws a timeline, as text for a terminal and as a picture for a paper (after the paper's figure 2c)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..svg import CHARACTER, Drawing, short, ticks
from .instruction import COMPUTE, Op
from .simulate import Span, Timeline

_STYLE = {  # name, colour of the bar, colour of the number on it; a recompute is a pale forward: the same work again
    Op.FORWARD: ("forward", "blue", "white"),
    Op.RECOMPUTE: ("recompute", "pale", "ink"),
    Op.BACKWARD: ("backward", "orange", "black"),
    Op.INPUT_GRADIENT: ("input gradient", "orange", "black"),
    Op.WEIGHT_GRADIENT: ("weight gradient", "green", "white"),
}
_FINEST = 0.4  # pixels; bars that are narrower are drawn together
_MOST_NUMBERS = 4000  # on bars: more would make a page heavy


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
    """Draws the timeline into an SVG file.

    Args:
        timeline: of ``simulate``, or measured.
        title: as in `Panel`.
        unit: of time, for the axis, such as "ms".
    """
    draw_panels([Panel(timeline, title)], unit).save(path)


def draw_panels(panels: Sequence[Panel], unit: str = "") -> Drawing:
    """Draws timelines below each other, on one scale of time."""
    tables = [_rows(panel.timeline) for panel in panels]
    # The width follows the numbers on the bars, the height the rows, within the limits of a page.
    bars = max(sum(s.instruction.op in COMPUTE for s in max(p.timeline.spans, key=len)) for p in panels)
    margin = 12 + 6.6 * max(len(label) for rows in tables for label, _, _ in rows)
    width = min(1600.0, max(680.0, margin + (9 + 6 * len(str(panels[0].timeline.micro_batches))) * bars))
    tall = max(4.0, min(22.0, 700 / max(map(len, tables))))
    height = sum(58 + tall * len(rows) for rows in tables)
    drawing = Drawing(width, height + 44, "; ".join(_title(panel) for panel in panels))
    scale, top = (width - margin - 12) / (max(p.timeline.span for p in panels) or 1.0), 8.0
    for panel, rows in zip(panels, tables, strict=True):
        drawing.text(8, top + 8, _title(panel), size=13, bold=True)
        _draw_rows(drawing, panel.timeline, rows, (margin, top + 24, scale, tall))
        top += 24 + tall * len(rows)
        for tick in ticks(0.0, panel.timeline.span):
            drawing.text(margin + scale * tick, top + 10, short(tick), "middle", 11)
        drawing.text(width - 4, top + 25, f"time ({unit})" if unit else "time", "end", 11)
        top += 34
    used = {op for panel in panels for op in _used(panel.timeline)}
    entries = [(name, colour) for op, (name, colour, _) in _STYLE.items() if op in used]
    several = any(len(panel.timeline.spans) < len(panel.timeline.placement) for panel in panels)
    drawing.legend([*entries, ("idle", "idle"), *([("works on another cell", "paper")] * several)], top + 8)
    return drawing


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


def _title(panel: Panel) -> str:
    timeline = panel.timeline
    K, M = len(timeline.placement), timeline.micro_batches
    facts = f"K = {K}, M = {M}, bubble {100 * timeline.bubble:.1f} %"
    return f"{panel.title}: {facts}" if panel.title else facts


def _draw_rows(
    drawing: Drawing,
    timeline: Timeline,
    rows: Sequence[tuple[str, int, int]],
    place: tuple[float, float, float, float],
) -> None:
    """Draws a row for each cell.

    Args:
        place: left and top of the first row's bars, pixels for a unit of time, and from row to row.
    """
    left, top, scale, tall = place
    size = min(11.0, 0.62 * tall)
    wide, numbers = CHARACTER * size * len(str(timeline.micro_batches - 1)), 0
    for row, (label, cell, worker) in enumerate(rows):
        y, high = top + row * tall, 0.86 * tall
        if row % -(-len(rows) // 40) == 0:
            drawing.text(left - 6, y + high / 2, label, "end", 11)
        # Where the worker runs another of its cells, this cell's row is empty, but the worker is not idle.
        computed = [s for s in timeline.spans[worker] if s.instruction.op in COMPUTE]
        drawing.bars([(left, y, scale * timeline.span, high)], "idle")
        for op in (None, *COMPUTE):
            own = [s for s in computed if (s.instruction.op if s.instruction.cell == cell else None) is op]
            bars = _joined([(left + scale * s.start, left + scale * s.end) for s in own])
            drawing.bars(
                [(x, y, end - x - (end - x > 2) * 0.7, high) for x, end in bars], _STYLE[op][1] if op else "paper"
            )
            for span in own if op and size >= 7 else ():
                # Measured bars of one kind differ; a number wider than its bar would be white on white.
                if scale * (span.end - span.start) >= wide + 1.5 and (numbers := numbers + 1) <= _MOST_NUMBERS:
                    middle = left + scale * (span.start + span.end) / 2
                    ink = _STYLE[op][2] if op else "ink"
                    drawing.text(middle, y + high / 2, str(span.instruction.micro_batch), "middle", size, ink)


def _joined(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns bars from left to right; those that would be too fine to see are joined with what is beside them."""
    found: list[tuple[float, float]] = []
    for start, end in bars:
        if found and start - found[-1][1] < _FINEST and min(end - start, found[-1][1] - found[-1][0]) < 2 * _FINEST:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
