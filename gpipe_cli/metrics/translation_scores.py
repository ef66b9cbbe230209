"""What is said of translations from many languages: averages of BLEU by how much data a language has.

The paper compares models by language, from the most to the least training data (section 5, figure 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

LEVELS = ("high", "middle", "low")  # resource: thirds of the languages, by their training pairs
LATIN, OTHER = "Latin", "other"  # scripts, as far as averages tell them apart


def languages_of(scores: Mapping[str, float], metric: str = "bleu") -> dict[str, float]:
    """The score of each language: what is called `bleu/<language>`."""
    return {name.removeprefix(f"{metric}/"): value for name, value in scores.items() if name.startswith(f"{metric}/")}


def resource_levels(sizes: Mapping[str, int]) -> dict[str, str]:
    """The level of each language: thirds by training pairs, most first; what does not divide goes to the first thirds.

    Of languages with as many pairs the one that stands first in ``sizes`` counts as the larger.
    """
    order = sorted(sizes, key=lambda language: -sizes[language])
    first, rest = divmod(len(order), 3)
    counts = [first + (number < rest) for number in range(3)]
    levels = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
    return dict(zip(order, levels, strict=True))


def with_averages(
    scores: Mapping[str, float], sizes: Mapping[str, int], scripts: Mapping[str, str], metric: str = "bleu"
) -> dict[str, float]:
    """A task's scores, with averages over languages where there are scores of several languages.

    Few sentences of a language make its own score noisy; the averages are over languages, so the noise evens out.

    Args:
        scores: `bleu`, of all sentences as one corpus, and `bleu/<language>`, of each language's sentences.
        sizes: training pairs of each language; empty where nobody knows, and then there are no levels.
        scripts: of each language, such as "Latin"; languages that are not in it are in no average by script.

    Returns:
        What has no slash, then `bleu_average`, the mean over languages; `bleu_high`, `bleu_middle` and `bleu_low`, the
        means over the levels of `resource_levels`; and for those who want to know more `bleu_high/Latin`,
        `bleu_high/other` and so on, by script too; then the languages, by falling numbers of training pairs.
    """
    found = languages_of(scores, metric)
    single = {code: found[code] for code in sorted(found, key=lambda code: -sizes.get(code, 0))}
    averages = {}
    if len(single) > 1:
        levels = resource_levels({code: sizes[code] for code in single if code in sizes})
        averages = {f"{metric}_average": fmean(single.values()), **_averages(single, levels, scripts, metric)}
    whole = {name: value for name, value in scores.items() if not name.startswith(f"{metric}/")}
    return {**whole, **averages, **{f"{metric}/{code}": value for code, value in single.items()}}


def _averages(
    single: Mapping[str, float], levels: Mapping[str, str], scripts: Mapping[str, str], metric: str
) -> dict[str, float]:
    """By level, then by level and script."""
    values: dict[str, list[float]] = {f"{metric}_{level}": [] for level in LEVELS}
    values |= {f"{metric}_{level}/{script}": [] for level in LEVELS for script in (LATIN, OTHER)}
    for code, value in single.items():
        if code in levels:
            values[f"{metric}_{levels[code]}"].append(value)
            if code in scripts:
                values[f"{metric}_{levels[code]}/{_kind(scripts[code])}"].append(value)
    return {name: fmean(of) for name, of in values.items() if of}


def by_script_and_level(
    languages: Iterable[str], sizes: Mapping[str, int], scripts: Mapping[str, str]
) -> dict[tuple[str, str], int]:
    """How many of the languages there are of each (script, level): what stands behind an average."""
    levels = resource_levels({code: sizes[code] for code in languages if code in sizes})
    counts: dict[tuple[str, str], int] = {}
    for code, level in levels.items():
        if code in scripts:
            key = (_kind(scripts[code]), level)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _kind(script: str) -> str:
    return LATIN if script == LATIN else OTHER
