"""Defines the task of translation (paper, section 5): label-smoothed loss with clipped logits, decoding, BLEU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..typed_section import Positive, ShareOrZero
from .base import GenerationSettings
from .language_model import LanguageModelTask


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Returns (BLEU from 0 to 100, sacreBLEU's signature) of detokenised sentences with one reference each.

    As Post (2018): 13a tokenisation, cased.
    """
    from sacrebleu.metrics.bleu import BLEU  # imported late: it takes longer than some whole runs

    metric = BLEU(force=True)  # force=True only silences a warning about text that looks tokenised
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


class TranslationTask(LanguageModelTask):
    """Adds decoding and BLEU to the loss of a language model; targets are the decoder's inputs one place later.

    Args:
        label_smoothing, logit_clip, pad_id: see `LanguageModelTask`.
        generation: the keys of `GenerationSettings`; None: an evaluation translates nothing.
    """

    def __init__(
        self,
        label_smoothing: ShareOrZero = 0.1,
        logit_clip: Positive | None = 25.0,
        pad_id: int | None = 0,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(label_smoothing, logit_clip, pad_id)
        self.generation = None if generation is None else GenerationSettings(**generation)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Returns float32 [b, V] of each hypothesis' next token, from the last position of logits [b, t, V].

        Padding gets −∞: it must never be generated.
        """
        last = logits[:, -1].float().log_softmax(-1)
        if self.pad_id is not None:
            last[:, self.pad_id] = -float("inf")
        return last

    def signature(self) -> str:
        """Returns sacreBLEU's signature, which describes how scores are counted."""
        return corpus_bleu(["a"], ["a"])[1]

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns `bleu` of all sentences together; with `groups`, a name for each sentence, also `bleu/<name>`.

        Raises:
            ValueError: there are no sentences, or the lists differ in length.
        """
        scores = {"bleu": corpus_bleu(hypotheses, references)[0]}
        members: dict[str, list[tuple[str, str]]] = {}
        for hypothesis, reference, group in zip(hypotheses, references, groups or (), strict=groups is not None):
            members.setdefault(group, []).append((hypothesis, reference))
        return scores | {f"bleu/{group}": corpus_bleu(*zip(*pairs, strict=True))[0] for group, pairs in members.items()}
