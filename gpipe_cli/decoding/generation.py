"""Held-out sentences translated when a model is evaluated: their scores, and some to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..metrics.records import Sample
from ..metrics.translation_scores import with_averages
from ..tasks.base import GenerationSettings
from .decoding import Decoder


class Sentence(Protocol):
    """One sentence to translate."""

    language: str
    source: str
    reference: str
    source_ids: Sequence[int]


class TextSource(Protocol):
    """What generation needs of a data source, beside batches."""

    pad_id: int
    bos_id: int
    eos_id: int

    # Optional: `sizes`, training pairs of each language, and `scripts`, of each language, for averages over languages.
    # Optional: `evaluation_split`, the held-out sentences that are translated; "dev" where there is none.

    def held_out(self, split: str, per_language: int) -> Sequence[Sentence]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ScoringTask(Protocol):
    """What generation needs of a task, beside the probabilities that decoding takes from it."""

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]: ...


class Generator:
    """Translates held-out sentences; every worker calls `evaluate` at the same step.

    Args:
        source: on the first worker of each replica, None elsewhere.
        samples: how many outputs are shown.
        speaks: whether this is the worker that reports: rank 0.
    """

    def __init__(
        self,
        decoder: Decoder,
        source: TextSource | None,
        task: ScoringTask,
        settings: GenerationSettings,
        samples: int,
        speaks: bool,
    ) -> None:
        self._decoder, self._source, self._task, self._settings = decoder, source, task, settings
        self._samples, self._speaks = samples, speaks

    def evaluate(self, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """(scores, samples) on rank 0, nothing elsewhere."""
        effort = self._settings.effort(final)
        split = getattr(self._source, "evaluation_split", "dev")
        sentences: list[Sentence] = []
        if self._source is not None:
            sentences = list(self._source.held_out(split, effort["sentences_per_language"]))
        found = self._decoder.decode([sentence.source_ids for sentence in sentences], effort["beam"])
        if self._source is None or not self._speaks or not sentences:  # a corpus may have no dev set
            return {}, []
        texts = [self._source.decode(hypothesis.tokens) for hypothesis in found]
        shown = _spread(len(sentences), self._samples)
        samples = [Sample(sentences[i].language, sentences[i].source, sentences[i].reference, texts[i]) for i in shown]
        return self._scores(texts, sentences), samples

    def _scores(self, texts: Sequence[str], sentences: Sequence[Sentence]) -> dict[str, float]:
        """The task's, for all sentences and for each language, with averages over languages."""
        references, languages = [s.reference for s in sentences], [s.language for s in sentences]
        scores = self._task.score(texts, references, languages)
        sizes, scripts = getattr(self._source, "sizes", {}), getattr(self._source, "scripts", {})
        return with_averages(scores, sizes, scripts)


def _spread(count: int, wanted: int) -> list[int]:
    """``wanted`` numbers below ``count``, evenly spread."""
    wanted = min(count, wanted)
    return [i * count // wanted for i in range(wanted)]
