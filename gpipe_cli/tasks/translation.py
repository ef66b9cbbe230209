"""Translation (paper, section 5): label-smoothed loss with clipped logits, decoding, BLEU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .bleu import bleu_of_groups, bleu_signature, corpus_bleu
from .generation import GenerationSettings
from .tokens import TokenPrediction


class TranslationTask(TokenPrediction):
    """Outputs: (logits [b, T, V],); targets: (target ids [b, T],), shifted by one against the decoder's input.

    Args:
        label_smoothing: ε, spread evenly over the vocabulary; training only.
        logit_clip: logits are clipped hard to [−logit_clip, logit_clip]; training only; None: not at all.
        pad_id: the target that is padding.
        generation: how many held-out sentences an evaluation translates, the keys of `GenerationSettings`; None: none.
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        logit_clip: float | None = 25.0,
        pad_id: int | None = 0,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(label_smoothing, logit_clip, pad_id)
        self.generation = None if generation is None else GenerationSettings(**generation)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of the next token of each hypothesis: logits [b, t, V], of which the last position counts, to float32 [b, V].

        Padding has none (−∞): it would read as a translation that goes on in silence.
        """
        last = logits[:, -1].float().log_softmax(-1)
        if self.pad_id is not None:
            last[:, self.pad_id] = -float("inf")
        return last

    @property
    def signature(self) -> str:
        """sacreBLEU's: how the scores were counted."""
        return bleu_signature()

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """`bleu` of all sentences together; with `groups`, a name for each sentence, also `bleu/<name>`.

        Raises:
            ValueError: there are no sentences, or the lists differ in length.
        """
        scores = {"bleu": corpus_bleu(hypotheses, references)[0]}
        if groups is not None:
            of_groups = bleu_of_groups(hypotheses, references, groups)
            scores |= {f"bleu/{group}": bleu for group, bleu in of_groups.items()}
        return scores
