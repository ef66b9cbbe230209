"""Computes BLEU with sacreBLEU (Post 2018): 13a tokenisation, cased."""

from __future__ import annotations

from collections.abc import Sequence


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Returns (BLEU from 0 to 100, sacreBLEU's signature) of detokenised sentences with one reference each."""
    from sacrebleu.metrics.bleu import BLEU  # imported late: it takes longer than some whole runs

    metric = BLEU(force=True)  # force=True only silences a warning about text that looks tokenised
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def bleu_of_groups(hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, float]:
    """Returns the BLEU of each group (a language, say), in the order in which groups first appear."""
    members: dict[str, list[tuple[str, str]]] = {}
    for hypothesis, reference, group in zip(hypotheses, references, groups, strict=True):
        members.setdefault(group, []).append((hypothesis, reference))
    return {group: corpus_bleu(*zip(*pairs, strict=True))[0] for group, pairs in members.items()}
