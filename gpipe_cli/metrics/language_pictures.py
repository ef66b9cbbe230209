"""Draws translation quality over many languages, as the paper does (section 5, figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from .figure import new_figure
from .translation_scores import LEVELS, resource_levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6db3", "#d9822b", "#2a7f3f", "#8e44ad", "#c0392b", "#555555")
MARKERS = ("o", "^", "v", "D", "P", "X")  # of models; the colour shows the level
MOST_NAMED_LANGUAGES = 110  # more codes along an axis are unreadable


@dataclass(frozen=True)
class ModelScores:
    """Holds the scores of one model.

    Attributes:
        name: in the picture.
        parameters: number of the model's parameters.
        languages: BLEU of each language.
    """

    name: str
    parameters: int
    languages: Mapping[str, float]


def draw_languages(
    models: Sequence[ModelScores],
    sizes: Mapping[str, int],
    path: Path,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draws BLEU over languages from the most to the least data, a curve for each model, and averages by level.

    Dots are languages; the line is the average of a language and those with a little more data (`trailing_average`).

    Args:
        sizes: training pairs of each language.
        baselines: BLEU of bilingual models; if given, the picture shows the differences to them, for the languages
            that have one.

    Raises:
        ValueError: there is no language that all models and the baselines have been evaluated on.
    """
    known = _common(models, sizes)
    levels = resource_levels({code: sizes[code] for code in known})
    codes = known if baselines is None else [code for code in known if code in baselines]
    if not codes:
        raise ValueError("there is no language that all models and a baseline have")
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=[3.4, 1])
    for model, colour in zip(models, cycle(COLOURS), strict=False):
        values = [model.languages[code] - (baselines[code] if baselines is not None else 0.0) for code in codes]
        left.plot(range(len(codes)), values, "o", color=colour, markersize=3, alpha=0.45)
        left.plot(range(len(codes)), trailing_average(values), color=colour, linewidth=2, label=model.name)
        by_level = [[value for code, value in zip(codes, values, strict=True) if levels[code] == at] for at in LEVELS]
        means = [fmean(of_level) if of_level else nan for of_level in by_level]
        right.plot(LEVELS, means, "o-", color=colour, linewidth=2)
    _name_languages(left, codes, sizes)
    left.set_ylabel("BLEU" if baselines is None else "BLEU, difference to the bilingual model")
    left.legend(frameon=False)
    right.set_title("mean over languages, by resource", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if baselines is not None:
            axes.axhline(0.0, color="black", linewidth=0.8)
    figure.savefig(path, dpi=130)


def draw_capacity(models: Sequence[ModelScores], sizes: Mapping[str, int], path: Path) -> None:
    """Draws the mean BLEU of high-, middle- and low-resource languages over the number of parameters.

    Raises:
        ValueError: there is no language that all models have been evaluated on.
    """
    codes = _common(models, sizes)
    levels = resource_levels({code: sizes[code] for code in codes})
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    for level, colour in zip(LEVELS, COLOURS, strict=False):
        chosen = [code for code in codes if levels[code] == level]
        for number, model in enumerate(models if chosen else ()):
            value = fmean(model.languages[code] for code in chosen)
            axes.plot(model.parameters / 1e6, value, MARKERS[number % len(MARKERS)], color=colour, markersize=8)
        axes.plot([], [], "s", color=colour, label=f"{level} resource, {len(chosen)} languages")
    for number, model in enumerate(models):
        axes.plot([], [], MARKERS[number % len(MARKERS)], color="black", fillstyle="none", label=model.name)
    axes.margins(0.12)
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel("BLEU, mean over languages")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def trailing_average(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it, over a tenth of the values."""
    width = max(1, round(len(values) / 10))
    return [fmean(values[max(0, last - width + 1) : last + 1]) for last in range(len(values))]


def _common(models: Sequence[ModelScores], sizes: Mapping[str, int]) -> list[str]:
    """Returns the languages that all models have a score for, most data first."""
    known = set(sizes).intersection(*(model.languages for model in models))
    if not known:
        raise ValueError("there is no language that all models have")
    return sorted(known, key=lambda code: (-sizes[code], code))


def _name_languages(axes: Axes, codes: Sequence[str], sizes: Mapping[str, int]) -> None:
    axes.set_xlabel(f"languages from the most to the least training data ({sizes[codes[0]]:,} to {sizes[codes[-1]]:,})")
    if len(codes) <= MOST_NAMED_LANGUAGES:
        size = 8 if len(codes) <= 40 else 5
        axes.set_xticks(range(len(codes)), codes, rotation=90, fontsize=size)
