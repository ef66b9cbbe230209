"""Computes BLEU with sacreBLEU (Post 2018): 13a tokenisation, cased."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Returns (BLEU from 0 to 100, sacreBLEU's signature) of detokenised sentences with one reference each.

    Raises:
        ValueError: there are no sentences, or not as many hypotheses as references.
    """
    metric = _metric()
    _check(hypotheses, references)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def bleu_signature() -> str:
    """Returns sacreBLEU's signature, which describes how `corpus_bleu` counts."""
    return corpus_bleu(["a"], ["a"])[1]


def bleu_of_groups(hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, float]:
    """Returns the BLEU of each group (a language, say), in the order in which groups first appear.

    Raises:
        ValueError: as `corpus_bleu` does, or if there is not one group name for each sentence.
    """
    _check(hypotheses, references)
    if len(groups) != len(hypotheses):
        raise ValueError(f"{len(groups)} group names for {len(hypotheses)} sentences: give one for each")
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    return {
        group: corpus_bleu([hypotheses[i] for i in numbers], [references[i] for i in numbers])[0]
        for group, numbers in members.items()
    }


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: BLEU needs one for each, and at least one"
        )


def _metric() -> BLEU:
    from sacrebleu.metrics.bleu import BLEU  # imported late: it takes longer than some whole runs

    return BLEU(force=True)  # force=True only silences a warning about text that looks tokenised
