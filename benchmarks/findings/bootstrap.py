"""Computes intervals of differences: of BLEU by paired bootstrap over sentences, of other figures over seeds."""

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import _bootstrap_resample, estimate_ci

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of Student's t by number of seeds
ORDER = 4  # of BLEU's n-grams
SAMPLES = 1000


def sentence_counts(translations: Path) -> dict[str, list[list[int]]]:
    """Returns for each language and sentence: tokens of output and reference, matching 1- to 4-grams, a digest.

    Args:
        translations: gpipe-eval's folder of LANGUAGE.txt, lines of source, reference and output.
    """
    found = {}
    for path in sorted(translations.glob("*.txt")):
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        counts = BLEU(force=True)._extract_corpus_statistics([row[2] for row in rows], [[row[1] for row in rows]])
        texts = [zlib.crc32("\t".join(row[:2]).encode()) for row in rows]  # which sentence it is
        found[path.stem] = [[*map(int, of[: 2 + ORDER]), text] for of, text in zip(counts, texts, strict=True)]
    return found


def resampled_bleu(counts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Returns one language's BLEU in each of sacreBLEU's resamples; its seed is fixed, so two systems are paired."""
    whole: list[list[int | float]] = [[*of[: 2 + ORDER], *(max(0, of[0] - n) for n in range(ORDER))] for of in counts]
    _, scores = _bootstrap_resample(whole, BLEU(force=True), SAMPLES)
    return np.array([score.score for score in scores])


def bleu_difference(
    one: Mapping[str, Sequence[Sequence[int]]], other: Mapping[str, Sequence[Sequence[int]]], languages: Sequence[str]
) -> tuple[float, float]:
    """Returns the mean over resamples of (one − other), each a mean over languages, and half of its 95 % interval.

    As the languages' test sentences are the same English ones, they are resampled alike, where none is missing. A
    sentence that is too long for one of the vocabularies does not count.
    """
    pairs = [(_those_of(other[code], one[code]), _those_of(one[code], other[code])) for code in languages]
    for code, (mine, theirs) in zip(languages, pairs, strict=True):
        assert [*map(_sentence, mine)] == [*map(_sentence, theirs)], f"{code}: not the same references"
    both = [resampled_bleu(mine) - resampled_bleu(theirs) for mine, theirs in pairs]
    mean, half = estimate_ci(np.mean(both, axis=0))
    return float(mean), float(half)


def _sentence(counts: Sequence[int]) -> tuple[int, ...]:
    return counts[1], *counts[2 + ORDER :]  # early pieces have no digest


def _those_of(other: Sequence[Sequence[int]], counts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Returns the counts of those sentences that another system has translated, too."""
    theirs = {*map(_sentence, other)}
    return [of for of in counts if _sentence(of) in theirs]


def seed_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Returns the mean difference over seeds and half of its 95 % interval by Student's t."""
    differences = [mine - theirs for mine, theirs in zip(one, other, strict=True)]
    if len(differences) < 2:
        return differences[0], math.nan
    n = len(differences)
    return statistics.fmean(differences), STUDENT[n] * statistics.stdev(differences) / math.sqrt(n)
