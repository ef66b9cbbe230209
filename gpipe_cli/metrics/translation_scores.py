"""Averages BLEU over languages, by the amount of training data of each language.

The paper compares models by language, from the most to the least training data (section 5, figure 3).
"""

from collections.abc import Collection, Mapping
from statistics import fmean

from ..data.source import split_evenly

LEVELS = ("high", "middle", "low")  # of resource: thirds of the languages by training pairs


def languages_of(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the score of each language, from the names `bleu/<language>`."""
    found = {name.removeprefix("bleu/"): value for name, value in scores.items() if name.startswith("bleu/")}
    return {language: value for language, value in found.items() if value is not None}


def resource_levels(sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns the level of each language: thirds by training pairs, most first; earlier thirds take the remainder.

    Languages with equal numbers of pairs keep their order in ``sizes``.
    """
    order = sorted(sizes, key=lambda language: -sizes[language])
    thirds = zip(LEVELS, split_evenly(len(order), 3), strict=True)
    return {language: level for level, third in thirds for language in order[third]}


def with_averages(scores: Mapping[str, float], sizes: Mapping[str, int], few: Collection[str] = ()) -> dict[str, float]:
    """Adds averages over languages to a task's scores, if there are scores of several languages.

    With few sentences the score of a single language is noisy; an average over languages is less so.

    Args:
        scores: `bleu`, of all sentences as one corpus, and `bleu/<language>`, of each language's sentences.
        sizes: training pairs of each language; empty if unknown: then there are no levels.
        few: languages with so few sentences that they do not count in averages.

    Returns:
        The scores without a slash; `bleu_average`, the mean over languages; `bleu_high`, `bleu_middle` and `bleu_low`,
        the means over the levels of `resource_levels`; the scores of the languages, most training pairs first.
    """
    found = languages_of(scores)
    single = {code: found[code] for code in sorted(found, key=lambda code: -sizes.get(code, 0))}
    averages = {}
    if len(single) > 1:
        levels = resource_levels({code: sizes[code] for code in single if code in sizes})
        members = {"average": list(single)} | {level: [c for c in levels if levels[c] == level] for level in LEVELS}
        for name, codes in members.items():
            if counted := [single[code] for code in codes if code not in few]:
                averages[f"bleu_{name}"] = fmean(counted)
    whole = {name: value for name, value in scores.items() if not name.startswith("bleu/")}
    return {**whole, **averages, **{f"bleu/{code}": value for code, value in single.items()}}
