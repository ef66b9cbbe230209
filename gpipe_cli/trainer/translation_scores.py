"""What is said of translations from many languages: BLEU of each, and averages by how much data a language has.

The paper compares models by language, from the most to the least training data (section 5, figure 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..tasks.bleu import bleu_of_groups, corpus_bleu

LEVELS = ("high", "middle", "low")  # resource: thirds of the languages, by their training pairs
LATIN, OTHER = "Latin", "other"  # scripts, as far as averages tell them apart


@dataclass(frozen=True)
class TranslationScores:
    """BLEU, from 0 to 100.

    Attributes:
        numbers: `bleu` of all sentences as one corpus; `bleu_average`, the mean over languages; `bleu_high`,
            `bleu_middle`, `bleu_low`, the means over the thirds of `resource_levels`; then, for those who want to know
            more, `bleu_high/Latin` and so on (languages of that level in that script) and `bleu/<language>`, by falling
            numbers of training pairs.
        signature: sacreBLEU's, which says how it was counted.
    """

    numbers: dict[str, float]
    signature: str

    @property
    def languages(self) -> dict[str, float]:
        """BLEU of each language."""
        return languages_of(self.numbers)


def languages_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """BLEU of each language among an evaluation's numbers."""
    return {name.removeprefix("bleu/"): value for name, value in numbers.items() if name.startswith("bleu/")}


def resource_levels(sizes: Mapping[str, int]) -> dict[str, str]:
    """The level of each language: thirds by training pairs, most first; what does not divide goes to the first thirds.

    Of languages with as many pairs the one that stands first in ``sizes`` counts as the larger.
    """
    order = sorted(sizes, key=lambda language: -sizes[language])
    first, rest = divmod(len(order), 3)
    counts = [first + (number < rest) for number in range(3)]
    levels = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
    return dict(zip(order, levels, strict=True))


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    languages: Sequence[str],
    sizes: Mapping[str, int],
    scripts: Mapping[str, str],
) -> TranslationScores:
    """BLEU of detokenised sentences with one reference each (sacreBLEU, 13a, cased).

    Few sentences of a language make its own figure noisy; the averages are over languages, so the noise evens out.

    Args:
        languages: of each sentence.
        sizes: training pairs of each language; empty where nobody knows, and then there are no levels.
        scripts: of each language, such as "Latin"; languages that are not in it are in no average by script.

    Raises:
        ValueError: there are no sentences, or the lists differ in length.
    """
    whole, signature = corpus_bleu(hypotheses, references)
    found = bleu_of_groups(hypotheses, references, languages)
    single = {code: found[code] for code in sorted(found, key=lambda code: -sizes.get(code, 0))}
    numbers = {"bleu": whole}
    if len(single) > 1:
        numbers["bleu_average"] = fmean(single.values())
        known = {code: sizes[code] for code in single if code in sizes}
        numbers |= _averages(single, resource_levels(known), scripts)
    return TranslationScores(numbers | {f"bleu/{code}": bleu for code, bleu in single.items()}, signature)


def _averages(single: Mapping[str, float], levels: Mapping[str, str], scripts: Mapping[str, str]) -> dict[str, float]:
    """By level, then by level and script."""

    def average(level: str, script: str | None) -> list[float]:
        return [
            bleu
            for code, bleu in single.items()
            if levels.get(code) == level and (script is None or (code in scripts and _kind(scripts[code]) == script))
        ]

    by_level = {f"bleu_{level}": average(level, None) for level in LEVELS}
    by_both = {f"bleu_{level}/{script}": average(level, script) for level in LEVELS for script in (LATIN, OTHER)}
    return {name: fmean(found) for name, found in (by_level | by_both).items() if found}


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
