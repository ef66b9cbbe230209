"""Defines how sentences are translated, token by token, and translates held-out sentences in an evaluation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.source import HeldOutSample, Source
from ..metrics.records import Sample
from ..metrics.translation_scores import languages_of, with_averages
from ..micro_batch import MicroBatch, Tensors
from ..tasks.base import GenerationSettings, Task
from .beam import BeamSearch
from .decoding import Decoder, Sizes


@dataclass(frozen=True)
class SpecialTokens:
    """Holds the ids of the tokens that begin and end a sentence, and of padding."""

    bos_id: int
    eos_id: int
    pad_id: int


@dataclass(frozen=True)
class TranslationForm:
    """Decodes sources, token ids with their end-of-sentence token, by beam search; a `DecodingForm`.

    Attributes:
        task: computes the log-probabilities of the next token from the last cell's outputs.
    """

    task: Task
    settings: GenerationSettings
    tokens: SpecialTokens

    @property
    def sizes(self) -> Sizes:
        settings = self.settings
        return Sizes(settings.group, max(settings.beam, settings.beam_during_run), uses_caches=True)

    def first(self, sources: Sequence[Sequence[int]]) -> MicroBatch:
        """Returns sources and first tokens; as targets the longest length of each translation."""
        width = max(len(source) for source in sources)
        padded = torch.tensor([[*source, *[self.tokens.pad_id] * (width - len(source))] for source in sources])
        first = torch.full((len(sources), 1), self.tokens.bos_id)
        limits = torch.tensor([[self.settings.longest(len(source))] for source in sources])
        return (padded, first), (limits,)

    def later(self, before: MicroBatch, parents: Tensor, tokens: Tensor) -> MicroBatch:
        """Returns one more token for each row and no source; the targets are not used."""
        return (tokens.new_zeros(len(tokens), 0), tokens[:, None]), (tokens[:, None],)

    def search(self, targets: Tensors, beam: int) -> BeamSearch:
        """Returns a beam search up to the longest lengths."""
        return BeamSearch(targets[0][:, 0], beam, self.settings.length_exponent, self.tokens.eos_id)

    def log_probabilities(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns the task's log-probabilities, [rows, V]."""
        return self.task.log_probabilities(outputs[0])


@dataclass(frozen=True)
class Generator:
    """Translates held-out sentences; every worker calls `evaluate` at the same step.

    Attributes:
        source: the data source, on the first worker of each replica; None elsewhere.
        samples: number of translations that are shown.
        reports: True if this worker returns the results, as rank 0 does.
    """

    decoder: Decoder
    source: Source | None
    task: Task
    settings: GenerationSettings
    samples: int
    reports: bool

    def evaluate(self, final: bool) -> tuple[dict[str, float], list[Sample], dict[str, float]]:
        """Returns scores, translations, and BLEU of each language's untranslated sources; on rank 0, nothing elsewhere.

        The scores are of all sentences, of each language, and averages over languages. Sources can be so like their
        translations that copying them is the first thing to beat; it is scored with the effort of the last evaluation.

        Args:
            final: True for the effort of the last evaluation.
        """
        settings = self.settings
        wanted = settings.per_language_at_end if final else settings.per_language
        beam = settings.beam if final else settings.beam_during_run
        sentences: list[HeldOutSample] = []
        if self.source is not None:
            wanted = self.source.evaluation_per_language if wanted is None else wanted
            sentences = self.source.held_out(self.source.evaluation_split, wanted)
        found = self.decoder.decode([sentence.source_ids for sentence in sentences], beam)
        if self.source is None or not self.reports or not sentences:  # a corpus may have no dev set
            return {}, [], {}
        texts = [self.source.decode(hypothesis.tokens) for hypothesis in found]
        pairs = zip(sentences, texts, strict=True)
        translations = [Sample(of.language, of.source, of.reference, text) for of, text in pairs]
        references, languages = [of.reference for of in sentences], [of.language for of in sentences]
        scores = self.task.score(texts, references, languages)
        fewest = settings.fewest_sentences if wanted is None else min(settings.fewest_sentences, wanted)
        few = {language for language, count in Counter(languages).items() if count < fewest}
        cut = sum(hypothesis.cut for hypothesis in found)
        counts = {"cut_translations": float(cut), "languages_with_few_sentences": float(len(few))}
        told = {name: count for name, count in counts.items() if count}
        copying = self.task.score([of.source for of in sentences], references, languages) if final else {}
        told |= {"bleu_copying": copying["bleu"]} if final else {}
        return {**with_averages(scores, self.source.sizes, few), **told}, translations, languages_of(copying)

    def shown(self, translations: Sequence[Sample]) -> list[Sample]:
        """Returns translations to show, from all languages."""
        shown = min(len(translations), self.samples)
        return [translations[number * len(translations) // shown] for number in range(shown)]
