"""BLEU as sacreBLEU counts it (Post 2018): 13a tokenisation, cased."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """(BLEU from 0 to 100, sacreBLEU's signature) of detokenised sentences with one reference each.

    Raises:
        ValueError: there are no sentences, or not as many hypotheses as references.
    """
    metric = _metric()
    _check(hypotheses, references)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def bleu_signature() -> str:
    """sacreBLEU's signature of what `corpus_bleu` counts."""
    return corpus_bleu(["a"], ["a"])[1]


def bleu_of_groups(hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, float]:
    """BLEU of each group (a language, say) as a corpus of its own; groups in the order in which they first appear.

    Raises:
        ValueError: as `corpus_bleu`, or not one group name for each sentence.
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
    from sacrebleu.metrics.bleu import BLEU  # here, because the import takes longer than some whole runs

    return BLEU(force=True)  # force: no warning about text that looks tokenised; the score is the same
