"""Shows what an evaluation has found: quality by language, and by class with confusions and the worst mistakes.

Imports no torch.
"""

from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gpipe_cli.data.cldr.languages import name_of
from gpipe_cli.terminal.document import Block, Cell, Grid, Image, Images, Lines
from gpipe_cli.terminal.text import percent

MOST_ROWS = 40  # classes in a table or a matrix
LONGEST_NAME = 20  # characters


def by_language(bleu: Mapping[str, float], evaluation: Mapping[str, Any], few: Collection[str] = ()) -> Grid:
    """Returns a table with a bar for each language.

    Args:
        bleu: score of each language, in the order of the rows.
        evaluation: figures of the languages: training pairs ("sizes"), "sentences", BLEU of "copying" the source.
        few: languages that are marked because they have few sentences.
    """
    sizes, sentences, copying = (evaluation.get(name) or {} for name in ("sizes", "sentences", "copying"))
    longest = max([1.0, *bleu.values()])
    rows: list[list[object]] = []
    for code, score in bleu.items():
        copied = f"{copying[code]:.1f}" if code in copying else ""
        facts = [code + "*" * (code in few), name_of(code), sizes.get(code, ""), sentences.get(code, "")]
        rows.append([*facts, f"{score:.1f}", Cell(bar=f"{score / longest:.0%}"), copied])
    title = "BLEU by language, from the most to the least training data"
    return Grid(["language", "", "pairs", "sentences", "BLEU", "", "copying"], rows, title)


def by_class(report: Mapping[str, Any]) -> Iterator[Block]:
    """Yields a table of the classes, the worst first, the matrix of confusions, and the worst mistakes.

    Args:
        report: result of `metrics.class_report.class_report`.
    """
    names = report["names"]
    found: dict[int, dict[int, int]] = {}  # label -> prediction -> number of examples
    for label, predicted, count in report["confusion"]:
        found.setdefault(label, {})[predicted] = count
    rows = [_accuracy(names, label, counts) for label, counts in found.items()]
    worst = [row for _, row in sorted(rows, key=lambda each: each[0])]
    yield Grid(["class", "examples", "right", "accuracy", "most often taken for"], worst[:MOST_ROWS])
    if len(names) <= MOST_ROWS:
        yield _confusion(names, found)
    else:
        yield Lines([f"The table has the {MOST_ROWS} worst of {len(names):,} classes."])
    mistakes = []
    for one in (each for each in report["worst"] if each["image"]):
        said = f"{names[one['label']]}, taken for {names[one['predicted']]} ({percent(one['probability'])})"
        mistakes.append(Image(b64decode(one["image"]), said))
    if mistakes:
        yield Images(mistakes, "The most certain mistakes")


def _accuracy(names: list[str], label: int, counts: Mapping[int, int]) -> tuple[float, list[object]]:
    """Returns the accuracy of a class, and its row in the table; counts: prediction -> number of examples."""
    examples, right = sum(counts.values()), counts.get(label, 0)
    wrong = {predicted: count for predicted, count in counts.items() if predicted != label}
    often = max(wrong, key=wrong.__getitem__, default=None)
    taken = "" if often is None else f"{names[often]} ({wrong[often]})"
    return right / examples, [names[label], examples, right, percent(right / examples), taken]


def _confusion(names: list[str], found: Mapping[int, Mapping[int, int]]) -> Grid:
    """Returns the matrix of labels (rows) and predictions (columns). A larger share of a row is darker."""
    rows: list[list[object]] = []
    for label, counts in found.items():
        row = [counts.get(predicted, 0) for predicted in range(len(names))]
        shades = [Cell(str(count or ""), shade=f"{count / sum(row):.0%}") for count in row]
        rows.append([f"{names[label][:LONGEST_NAME]} ({label + 1})", *shades])
    columns = ["label", *(str(number + 1) for number in range(len(names)))]
    return Grid(columns, rows, "Confusion of classes: rows are labels, columns predictions, in the same order")
