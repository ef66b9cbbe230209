"""Draws a timeline, as text for a terminal and as a picture for a paper (after the paper's figure 2c)."""

from collections.abc import Mapping, Sequence

from ..svg import Bar, Drawing, short, ticks
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


def draw_text(timeline: Timeline) -> str:
    """Returns the timeline as a grid of characters: a row per worker, a column per unit of time.

    Each column shows a unit of time: ``F0`` the forward of micro-batch 0, ``R0`` its recompute, ``B0`` its backward,
    ``I0`` and ``W0`` its halves, ``.`` nothing (see `legend`). A worker with several cells has a row for each of them.

    Args:
        timeline: result of `simulate` with unit durations.
    """
    columns = max(1, round(timeline.span))
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
                for column in range(round(span.start), round(span.end)):
                    grid[column] = mark
        lines.append(f"{label:<{margin}} | " + " ".join(f"{mark:>{width}}" for mark in grid))
    return "\n".join(line.rstrip() for line in lines)


def legend(timeline: Timeline) -> str:
    """Returns the meaning of those letters of `draw_text` that occur."""
    words = ", ".join(f"{op.value} {_STYLE[op][0]}" for op in _used(timeline))
    return f"{words}, with the micro-batch; . idle"


def draw_panels(panels: Mapping[str, Timeline], unit: str = "") -> Drawing:
    """Draws timelines, simulated or measured, below each other on one scale of time.

    Args:
        panels: timelines by their titles.
        unit: unit of time for the axis, such as "ms"; "": none is shown.
    """
    titles = {
        f"{title}: K = {len(line.placement)}, M = {line.micro_batches}, bubble {100 * line.bubble:.1f} %": line
        for title, line in panels.items()
    }
    lines = list(panels.values())
    # The width follows the numbers on the bars, the height the rows, within the limits of a page.
    bars = max(sum(s.instruction.op in COMPUTE for s in max(line.spans, key=len)) for line in lines)
    margin = 12 + 6.6 * max(len(label) for line in lines for label, _, _ in _rows(line))
    width = min(1600.0, max(680.0, margin + (9 + 6 * len(str(lines[0].micro_batches))) * bars))
    tall = max(4.0, min(22.0, 700 / max(len(line.placement) for line in lines)))
    height = sum(58 + tall * len(line.placement) for line in lines)
    drawing = Drawing(width, height + 44, "; ".join(titles))
    scale, top = (width - margin - 12) / (max(line.span for line in lines) or 1.0), 8.0
    for title, line in titles.items():
        drawing.text(8, top + 8, title, size=13, bold=True)
        _draw_rows(drawing, line, (margin, top + 24, scale, tall))
        top += 24 + tall * len(line.placement)
        for tick in ticks(0.0, line.span):
            drawing.text(margin + scale * tick, top + 10, short(tick), "middle", 11)
        drawing.text(width - 4, top + 25, f"time ({unit})" if unit else "time", "end", 11)
        top += 34
    used = {op for line in lines for op in _used(line)}
    entries = [(name, colour) for op, (name, colour, _) in _STYLE.items() if op in used]
    several = any(len(line.spans) < len(line.placement) for line in lines)
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


def _draw_rows(drawing: Drawing, timeline: Timeline, place: Bar) -> None:
    """Draws a row for each cell.

    Args:
        place: left edge and top of the first row's bars, pixels per unit of time, and pixels from row to row.
    """
    left, top, scale, tall = place
    rows, size, numbers = _rows(timeline), min(11.0, 0.62 * tall), 0
    wide = 0.58 * size * len(str(timeline.micro_batches - 1))  # of a number
    for row, (label, cell, worker) in enumerate(rows):
        y, high = top + row * tall, 0.86 * tall
        if row % -(-len(rows) // 40) == 0:
            drawing.text(left - 6, y + high / 2, label, "end", 11)
        # Where the worker runs another of its cells, this cell's row is empty, but the worker is not idle.
        computed = [s for s in timeline.spans[worker] if s.instruction.op in COMPUTE]
        drawing.bars([(left, y, scale * timeline.span, high)], "idle")
        others = [s for s in computed if s.instruction.cell != cell]
        drawing.bars([(x, y, width, high) for x, width in _joined(others, left, scale)], "paper")
        for op, (_, colour, ink) in _STYLE.items():
            own = [s for s in computed if s.instruction.op is op and s.instruction.cell == cell]
            drawing.bars([(x, y, width, high) for x, width in _joined(own, left, scale)], colour)
            for span in own if size >= 7 else ():
                # Measured bars of one kind differ; a number wider than its bar would be white on white.
                if scale * (span.end - span.start) >= wide + 1.5 and (numbers := numbers + 1) <= _MOST_NUMBERS:
                    middle = left + scale * (span.start + span.end) / 2
                    drawing.text(middle, y + high / 2, str(span.instruction.micro_batch), "middle", size, ink)


def _joined(spans: Sequence[Span], left: float, scale: float) -> list[tuple[float, float]]:
    """Returns (begin, width) of the bars of some spans, in pixels; bars too fine to see are joined with neighbours."""
    found: list[tuple[float, float]] = []
    for start, end in ((left + scale * span.start, left + scale * span.end) for span in spans):
        if found and start - found[-1][1] < _FINEST and min(end - start, found[-1][1] - found[-1][0]) < 2 * _FINEST:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return [(x, end - x - (end - x > 2) * 0.7) for x, end in found]
