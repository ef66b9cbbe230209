"""Shows what an evaluation has made of each class: accuracy, confusions, the worst mistakes. Imports no torch."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpipe_cli.svg import Drawing
from gpipe_cli.terminal.document import Block, Grid, Lines, Picture
from gpipe_cli.terminal.text import percent

MOST_ROWS = 40  # classes in a table or a matrix
ACROSS, SIDE = 8, 104.0  # mistakes beside each other, and pixels of each


def classes_shown(report: Mapping[str, Any]) -> Iterator[Block]:
    """Yields a table of the classes, the worst first, the matrix of confusions, and the worst mistakes.

    Args:
        report: result of `metrics.class_report.class_report`.
    """
    yield accuracy_by_class(report)
    names = report["names"]
    if len(names) <= MOST_ROWS:
        yield Picture(str(_draw_confusion(names, report["confusion"])))
    else:
        yield Lines([f"The table has the {MOST_ROWS} worst of {len(names):,} classes."])
    if mistakes := [of for of in report["worst"] if of["image"]]:
        yield Picture(str(_draw_mistakes(names, mistakes)))


def accuracy_by_class(report: Mapping[str, Any]) -> Grid:
    """Returns a table with a row for each class, at most `MOST_ROWS`, the least accurate first."""
    found: dict[int, dict[int, int]] = {}
    for label, predicted, count in report["confusion"]:
        found.setdefault(label, {})[predicted] = count
    rows = []
    for label, of in found.items():
        images, wrong = sum(of.values()), {predicted: n for predicted, n in of.items() if predicted != label}
        often = max(wrong, key=lambda predicted: wrong[predicted]) if wrong else None
        taken = "" if often is None else f"{report['names'][often]} ({wrong[often]})"
        rows.append((of.get(label, 0) / images, [report["names"][label], images, of.get(label, 0)], taken))
    rows.sort(key=lambda row: row[0])
    shown = [[*facts, percent(share), taken] for share, facts, taken in rows[:MOST_ROWS]]
    return Grid(["class", "examples", "right", "accuracy", "most often taken for"], shown)


def _draw_confusion(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> Drawing:
    """Draws a square for each label (row) and prediction (column), the stronger the larger its share of the row."""
    side = 28.0 if len(names) <= 12 else 16.0
    left, top = 24 + 6.5 * max(len(name[:20]) for name in names), 56.0
    totals = dict.fromkeys(range(len(names)), 0)
    for label, _, count in confusion:
        totals[label] += count
    drawing = Drawing(max(560, left + side * len(names) + 8), top + side * len(names) + 22, "Confusion of classes")
    drawing.text(8, 14, "Rows: labels; columns: predictions, in the same order", size=14, bold=True)
    for number, name in enumerate(names):
        drawing.text(left - 6, top + side * (number + 0.5), name[:20], "end", 11)
        drawing.text(left + side * (number + 0.5), top - 10, str(number + 1), "middle", 10)
    for label, predicted, count in confusion:
        place, strength = (left + side * predicted, top + side * label), count / totals[label]
        drawing.square(*place, side - 1, strength, f"{names[label]} taken for {names[predicted]}: {count}")
        if side > 20:
            colour = "white" if strength > 0.5 else "ink"
            drawing.text(place[0] + side / 2, place[1] + side / 2, str(count), "middle", 10, colour)
    return drawing


def _draw_mistakes(names: Sequence[str], mistakes: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draws the images of mistakes, the most certain first, each with its label and the class it was taken for."""
    rows = -(-len(mistakes) // ACROSS)
    drawing = Drawing(16 + ACROSS * SIDE, 34 + rows * (SIDE + 34), "The most certain mistakes")
    drawing.text(8, 14, "The most certain mistakes: the label, and what it was taken for", size=14, bold=True)
    for number, of in enumerate(mistakes):
        x, y = 8 + SIDE * (number % ACROSS), 34 + (SIDE + 34) * (number // ACROSS)
        label, predicted = names[of["label"]], names[of["predicted"]]
        drawing.image(x, y, SIDE - 8, of["image"], f"example {of['example']}: {label}, taken for {predicted}")
        drawing.text(x, y + SIDE, label[:15], size=11)
        drawing.text(x, y + SIDE + 13, f"{predicted[:10]} {percent(of['probability'])}", size=11, colour="red")
    return drawing


def draw_sheet(png: bytes) -> Drawing:
    """Draws the sheet of augmented images."""
    drawing = Drawing(516, 540, "Images of the first step, as the network sees them")
    drawing.text(8, 14, drawing.alt, size=14, bold=True)
    drawing.image(8, 32, 500, b64encode(png).decode(), drawing.alt)
    return drawing
