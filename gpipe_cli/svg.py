"""Draws pictures as SVG, light and dark: bars, curves and text. No library, so that a run draws in milliseconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from math import ceil, floor, isfinite, log10
from pathlib import Path
from statistics import fmean

from gpipe_cli.disk import write_whole

# Light, and dark where a person's screen is. Blue and orange differ for every kind of colour blindness, and in
# lightness when printed in grey; warm colours for lost time, grey for what is only calculated.
COLOURS = {
    "ink": ("#2b2f36", "#e3e6ea"),
    "paper": ("#ffffff", "#16191d"),
    "idle": ("#eceef1", "#2a2f36"),
    "blue": ("#2f6db3", "#5a9be0"),
    "pale": ("#a9cdee", "#2f567c"),
    "orange": ("#f0a43a", "#e09a3a"),
    "green": ("#1c8f78", "#35b096"),
    "red": ("#b9412f", "#d9604d"),
    "grey": ("#8a919c", "#8a919c"),
    "light": ("#d9dce1", "#444b55"),
    "leaf": ("#4d9a6a", "#66b886"),
    "black": ("#2b2f36", "#10131a"),  # on bars that are light in both
    "white": ("#ffffff", "#ffffff"),
}
DARK = "@media screen and (prefers-color-scheme:dark)"
_RULES = [
    "".join(f".f-{of}{{fill:{both[dark]}}}.s-{of}{{stroke:{both[dark]};fill:none}}" for of, both in COLOURS.items())
    for dark in (0, 1)
]
STYLE = f"svg text{{font-family:system-ui,sans-serif}}{_RULES[0]}{DARK}{{{_RULES[1]}}}"
Bar = tuple[float, float, float, float]  # x, y, width, height


@dataclass
class Drawing:
    """Collects the parts of a picture, in pixels.

    Attributes:
        alt: words for who cannot see the picture.
    """

    width: float
    height: float
    alt: str
    parts: list[str] = field(default_factory=list)

    def bars(self, bars: Sequence[Bar], colour: str) -> None:
        """Adds filled rectangles."""
        path = "".join(f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z" for x, y, width, height in bars)
        self.parts += [f'<path class="f-{colour}" d="{path}"/>'] * bool(path)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0, dash: str = "") -> None:
        """Adds a line through points; a point whose y is not finite interrupts it."""
        path, pen = "", "M"
        for x, y in points:
            path, pen = (f"{path}{pen}{x:.1f} {y:.1f}", "L") if isfinite(y) else (path, "M")
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts += [f'<path class="s-{colour}" stroke-width="{width}"{dashes} d="{path}"/>'] * bool(path)

    def dots(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Adds a dot at each point."""
        self.parts += [f'<circle class="f-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: float = 12,
        colour: str = "ink",
        bold: bool = False,
    ) -> None:
        """Adds text whose middle line is at y; ``anchor``: "start", "middle" or "end"."""
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{x:.1f}" y="{y + 0.35 * size:.1f}" font-size="{size:g}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="f-{colour}" {place}{weight}>{escape(text, quote=False)}</text>')

    def legend(self, entries: Sequence[tuple[str, str]], y: float, lines: bool = False) -> float:
        """Adds names with their colours, in rows from y on; returns the y where the rows end."""
        x = 8.0
        for name, colour in entries:
            wide = 34 + 7 * len(name)
            x, y = (8.0, y + 18) if x + wide > self.width else (x, y)
            if colour == "paper":
                self.line([(x, y - 5), (x + 11, y - 5), (x + 11, y + 5), (x, y + 5), (x, y - 5)], "ink", 0.5)
            self.bars([(x, y - 1.5, 12, 3) if lines else (x, y - 5, 11, 10)], colour)
            self.text(x + 17, y, name)
            x += wide
        return y + 14

    def __str__(self) -> str:
        """Returns the picture as an SVG element, as HTML pages hold it."""
        size = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        head = f'<svg {size} role="img" aria-label="{escape(self.alt)}">'
        style = f"<title>{escape(self.alt)}</title><style>{STYLE}</style>"
        paper = '<rect class="f-paper" width="100%" height="100%"/>'
        return "\n".join([head, style, paper, *self.parts, "</svg>"])

    def save(self, path: str | Path) -> None:
        """Writes the SVG file."""
        write_whole(Path(path), f"{self}\n".replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))


@dataclass(frozen=True)
class Curve:
    """Describes one line of a plot.

    Attributes:
        panel: title of the panel that it stands in.
        role: "paper", "ours", "ideal", "limit", "peer" or "raw": how it is drawn.
        points: (x, y).
    """

    panel: str
    label: str
    role: str
    points: Sequence[tuple[float, float]]


Look = tuple[str, float, str, bool]  # colour, width, dashes, whether points have dots
_LOOKS: dict[str, Look] = {  # of a role
    "ours": ("blue", 2.2, "", True),
    "smooth": ("blue", 2.2, "", False),
    "paper": ("orange", 1.8, "", True),
    "ideal": ("grey", 1.5, "2 3", False),
    "limit": ("grey", 1.3, "7 4", True),
    "raw": ("pale", 1.0, "", False),
}
_PEERS = ("green", ""), ("leaf", "6 3"), ("red", "2 3"), ("ink", "8 3 2 3")  # colour and dashes of one after the other
_COLUMNS, _PANEL, _TALL, _LEFT = 3, 300.0, 190.0, 58.0  # of a plot: panels in a row, and pixels


def plot(curves: Sequence[Curve], axes: tuple[str, str], title: str, from_zero: bool = True) -> Drawing:
    """Draws curves over a grid, in panels by their titles; each label looks alike in all panels.

    Args:
        axes: names of x and y.
        title: title of the whole drawing, and its alternative text.
        from_zero: the y axis begins at 0.
    """
    panels = {curve.panel: [each for each in curves if each.panel == curve.panel] for curve in curves}
    columns = min(_COLUMNS, len(panels)) or 1
    wide = _PANEL if columns > 1 else 640.0
    peers = dict.fromkeys(curve.label for curve in curves if curve.role == "peer")
    looks = {curve.label: _LOOKS.get(curve.role, _LOOKS["ours"]) for curve in curves}
    looks |= {label: (colour, 1.2, dashes, True) for label, (colour, dashes) in zip(peers, cycle(_PEERS), strict=False)}
    rows = ceil(len(panels) / columns) or 1
    drawing = Drawing(columns * (_LEFT + wide), 44 + rows * (_TALL + 56) + 20 * (1 + 24 * len(looks) // 96), title)
    drawing.text(8, 14, title, size=14, bold=True)
    for number, (name, drawn) in enumerate(panels.items()):
        row, column = divmod(number, columns)
        place = (column * (_LEFT + wide) + _LEFT - 8, 50 + row * (_TALL + 56), wide - 8, _TALL)
        _panel(drawing, place, name, drawn, looks, from_zero)
        drawing.text(place[0] + place[2], place[1] + _TALL + 30, axes[0], "end", 11)
        drawing.text(place[0] - 44, place[1] - 12, axes[1], size=11)
    drawing.legend([(label, look[0]) for label, look in looks.items()], drawing.height - 32, lines=True)
    return drawing


def _panel(
    drawing: Drawing, place: Bar, name: str, curves: Sequence[Curve], looks: dict[str, Look], from_zero: bool
) -> None:
    """Draws one panel of `plot` into a rectangle: title, axes and curves."""
    left, top, wide, tall = place
    points = [(x, y) for curve in curves for x, y in curve.points if isfinite(y)] or [(0.0, 0.0), (1.0, 1.0)]
    xs, ys = sorted({x for x, _ in points}), sorted(y for _, y in points)
    low, high = (0.0 if from_zero else ys[0]), ys[-1]
    low, high = low - 0.04 * (high - low) * (low != 0), high + 0.06 * ((high - low) or abs(high) or 1.0)
    low, across = low - (low == high), (xs[-1] - xs[0]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + wide * (x - xs[0]) / across, top + tall * (1 - (y - low) / (high - low))

    drawing.text(left + wide, top - 12, name, "end", 12, bold=True)
    for y in ticks(low, high):
        level = at(points[0][0], y)[1]
        drawing.line([(left, level), (left + wide, level)], "light", 0.6)
        drawing.text(left - 6, level, short(y), "end", 11)
    for x in xs if len(xs) <= 8 else [x for x in ticks(xs[0], xs[-1]) if xs[0] <= x <= xs[-1]]:
        drawing.text(at(x, points[0][1])[0], top + tall + 14, short(x), "middle", 11)
    for curve in curves:
        colour, width, dash, dotted = looks[curve.label]
        placed = [at(x, y) if isfinite(y) else (0.0, y) for x, y in curve.points]
        drawing.line(placed, colour, width, dash)
        if dotted:
            drawing.dots([(x, y) for x, y in placed if isfinite(y)], colour)


def draw_shares(columns: Mapping[str, Mapping[str, float]], title: str) -> Drawing:
    """Draws a horizontal bar for each column, such as {"measured": …}: shares of a step in percent, as in table 4."""
    names = [name.replace("_", " ") for name in next(iter(columns.values()))]
    # As in `schedule/picture.py`: blue forward, pale recompute; warm colours for lost time.
    colours = ("blue", "pale", "light", "red", "grey", "leaf")
    margin = 16 + 6.6 * max(map(len, columns))
    said = (f"{column}: {', '.join(f'{k} {v:.1%}' for k, v in row.items())}" for column, row in columns.items())
    drawing = Drawing(700, 78 + 34 * len(columns), f"{title}; {'; '.join(said)}".replace("_", " "))
    drawing.text(8, 14, f"{title}, % of the workers' time", size=13, bold=True)
    for row, (column, shares) in enumerate(columns.items()):
        left, y = margin, 30.0 + 34 * row
        drawing.text(margin - 8, y + 13, column, "end")
        for share, colour in zip(shares.values(), colours, strict=True):
            width = share * (700 - margin - 12)
            drawing.bars([(left, y, max(0.0, width - 0.7), 26)], colour)
            if width >= 28:
                ink = "ink" if colour in ("pale", "light") else "white"
                drawing.text(left + width / 2, y + 13, f"{100 * share:.1f}", "middle", 11, ink)
            left += width
    drawing.legend(list(zip(names, colours, strict=True)), 44.0 + 34 * len(columns))
    return drawing


def running_means(values: Sequence[float], share: float) -> list[float]:
    """Returns for each value the mean of it and those just before it; the window is a share of all values."""
    width = max(1, round(share * len(values)))
    return [fmean(values[max(0, last - width) : last]) for last in range(1, len(values) + 1)]


def ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers within a range, for an axis."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def short(value: float) -> str:
    """Returns a number for an axis: 0.25, 1,500, 3M."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"
