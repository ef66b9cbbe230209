"""Translates held-out sentences in an evaluation: returns their scores and the translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.source import HeldOutSample, Source
from ..metrics.records import Sample
from ..metrics.translation_scores import with_averages
from ..tasks.base import GenerationSettings, Task
from .decoding import Decoder


@dataclass(frozen=True)
class Generator:
    """Translates held-out sentences; every worker calls `evaluate` at the same step.

    Attributes:
        source: on the first worker of each replica, None elsewhere.
        samples: how many translations are shown.
        reports: whether this worker returns the results: rank 0.
    """

    decoder: Decoder
    source: Source | None
    task: Task
    settings: GenerationSettings
    samples: int
    reports: bool

    def evaluate(self, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """Returns (scores, translations) on rank 0, nothing elsewhere.

        Args:
            final: with the effort of the last evaluation.
        """
        settings = self.settings
        wanted, beam = settings.per_language, settings.beam_during_run
        if final:
            wanted, beam = settings.per_language_at_end, settings.beam
        sentences: list[HeldOutSample] = []
        if self.source is not None:
            wanted = self.source.evaluation_per_language if wanted is None else wanted
            sentences = self.source.held_out(self.source.evaluation_split, wanted)
        found = self.decoder.decode([sentence.source_ids for sentence in sentences], beam)
        if self.source is None or not self.reports or not sentences:  # a corpus may have no dev set
            return {}, []
        texts = [self.source.decode(hypothesis.tokens) for hypothesis in found]
        pairs = zip(sentences, texts, strict=True)
        translations = [Sample(of.language, of.source, of.reference, text) for of, text in pairs]
        return self._scores(self.source, texts, sentences), translations

    def shown(self, translations: Sequence[Sample]) -> list[Sample]:
        """Returns translations to show, from all languages."""
        shown = min(len(translations), self.samples)
        return [translations[number * len(translations) // shown] for number in range(shown)]

    def _scores(self, source: Source, texts: Sequence[str], sentences: Sequence[HeldOutSample]) -> dict[str, float]:
        """Returns the task's scores of all sentences and of each language, with averages over languages."""
        references, languages = [s.reference for s in sentences], [s.language for s in sentences]
        scores = self.task.score(texts, references, languages)
        return with_averages(scores, source.sizes)
