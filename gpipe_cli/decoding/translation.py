"""Defines how sentences are translated: the source and the first token, then one token after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..micro_batch import MicroBatch, Tensors
from ..tasks.base import GenerationSettings, Task
from .beam import BeamSearch
from .decoding import Sizes


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
        return Sizes(settings.group, settings.widest, settings.max_length, uses_caches=True)

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
        """Returns the task's, [rows, V]."""
        return self.task.log_probabilities(outputs[0])
