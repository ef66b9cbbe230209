"""Averages BLEU over languages, by the amount of training data of each language.

The paper compares models by language, from the most to the least training data (section 5, figure 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from ..data.source import split_evenly

LEVELS = ("high", "middle", "low")  # of resource: thirds of the languages by training pairs
LATIN, OTHER = "Latin", "other"  # scripts that the averages distinguish


def languages_of(scores: Mapping[str, float]) -> dict[str, float]:
    """Returns the score of each language, from the names `bleu/<language>`."""
    return {name.removeprefix("bleu/"): value for name, value in scores.items() if name.startswith("bleu/")}


def resource_levels(sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns the level of each language: thirds by training pairs, most first; earlier thirds take the remainder.

    Languages with equal numbers of pairs keep their order in ``sizes``.
    """
    order = sorted(sizes, key=lambda language: -sizes[language])
    thirds = zip(LEVELS, split_evenly(len(order), 3), strict=True)
    return {language: level for level, third in thirds for language in order[third]}


def with_averages(
    scores: Mapping[str, float], sizes: Mapping[str, int], scripts: Mapping[str, str]
) -> dict[str, float]:
    """Adds averages over languages to a task's scores, if there are scores of several languages.

    With few sentences the score of a single language is noisy; an average over languages is less so.

    Args:
        scores: `bleu`, of all sentences as one corpus, and `bleu/<language>`, of each language's sentences.
        sizes: training pairs of each language; empty if unknown: then there are no levels.
        scripts: of each language, such as "Latin"; languages that are not in it are in no average by script.

    Returns:
        The scores without a slash; `bleu_average`, the mean over languages; `bleu_high`, `bleu_middle` and `bleu_low`,
        the means over the levels of `resource_levels`; the same by script, as `bleu_high/Latin` and `bleu_high/other`;
        the scores of the languages, by falling number of training pairs.
    """
    found = languages_of(scores)
    single = {code: found[code] for code in sorted(found, key=lambda code: -sizes.get(code, 0))}
    averages = {}
    if len(single) > 1:
        levels = resource_levels({code: sizes[code] for code in single if code in sizes})
        averages = {"bleu_average": fmean(single.values()), **_averages(single, levels, scripts)}
    whole = {name: value for name, value in scores.items() if not name.startswith("bleu/")}
    return {**whole, **averages, **{f"bleu/{code}": value for code, value in single.items()}}


def _averages(single: Mapping[str, float], levels: Mapping[str, str], scripts: Mapping[str, str]) -> dict[str, float]:
    """Returns the means by level, then by level and script."""
    values: dict[str, list[float]] = {f"bleu_{level}": [] for level in LEVELS}
    values |= {f"bleu_{level}/{script}": [] for level in LEVELS for script in (LATIN, OTHER)}
    for code, value in single.items():
        if code in levels:
            values[f"bleu_{levels[code]}"].append(value)
            if code in scripts:
                values[f"bleu_{levels[code]}/{_kind(scripts[code])}"].append(value)
    return {name: fmean(of) for name, of in values.items() if of}


def _kind(script: str) -> str:
    return LATIN if script == LATIN else OTHER
