"""Translates held-out sentences in an evaluation: returns their scores and a few translations to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..metrics.records import Sample
from ..metrics.translation_scores import with_averages
from ..tasks.base import GenerationSettings
from .decoding import Decoder


class Sentence(Protocol):
    """Describes one sentence to translate."""

    language: str
    source: str
    reference: str
    source_ids: Sequence[int]


class HeldOutSource(Protocol):
    """Defines what generation reads of a data source, beside batches.

    Optional attributes: `sizes` and `scripts`, training pairs and script of each language, for averages over languages;
    `evaluation_split`, the held-out sentences to translate ("dev" where there is none); `evaluation_per_language`, how
    many of each language the loss is evaluated on (all where there is none).
    """

    def held_out(self, split: str, per_language: int | None) -> Sequence[Sentence]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ScoringTask(Protocol):
    """Defines how a task scores translations."""

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]: ...


@dataclass(frozen=True)
class Generator:
    """Translates held-out sentences; every worker calls `evaluate` at the same step.

    Attributes:
        source: on the first worker of each replica, None elsewhere.
        samples: how many translations are shown.
        reports: whether this worker returns the results: rank 0.
    """

    decoder: Decoder
    source: HeldOutSource | None
    task: ScoringTask
    settings: GenerationSettings
    samples: int
    reports: bool

    def evaluate(self, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """Returns (scores, samples) on rank 0, nothing elsewhere; ``final``: with the effort of the last evaluation."""
        settings = self.settings
        wanted, beam = settings.per_language, settings.beam_during_run
        if final:
            wanted, beam = settings.per_language_at_end, settings.beam
        if wanted is None:
            wanted = getattr(self.source, "evaluation_per_language", None)
        split = getattr(self.source, "evaluation_split", "dev")
        sentences: list[Sentence] = []
        if self.source is not None:
            sentences = list(self.source.held_out(split, wanted))
        found = self.decoder.decode([sentence.source_ids for sentence in sentences], beam)
        if self.source is None or not self.reports or not sentences:  # a corpus may have no dev set
            return {}, []
        texts = [self.source.decode(hypothesis.tokens) for hypothesis in found]
        pairs = list(zip(sentences, texts, strict=True))
        shown = min(len(pairs), self.samples)
        spread = [pairs[number * len(pairs) // shown] for number in range(shown)]
        samples = [Sample(sentence.language, sentence.source, sentence.reference, text) for sentence, text in spread]
        return self._scores(texts, sentences), samples

    def _scores(self, texts: Sequence[str], sentences: Sequence[Sentence]) -> dict[str, float]:
        """Returns the task's scores of all sentences and of each language, with averages over languages."""
        references, languages = [s.reference for s in sentences], [s.language for s in sentences]
        scores = self.task.score(texts, references, languages)
        return with_averages(scores, getattr(self.source, "sizes", {}), getattr(self.source, "scripts", {}))
