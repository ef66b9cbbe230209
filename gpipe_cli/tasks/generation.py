"""How much a task generates when it is evaluated, and how it searches."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = {
    **dict.fromkeys(("per_language", "per_language_at_end", "group", "max_length", "beam", "beam_during_run"), 1),
    **dict.fromkeys(("length_exponent", "length_ratio", "length_extra"), 0),
}
WHOLE = ("per_language", "per_language_at_end", "group", "max_length", "beam", "beam_during_run", "length_extra")


@dataclass(frozen=True)
class GenerationSettings:
    """The attribute ``generation`` of a task that generates. A run from before a key existed has its default here.

    Attributes:
        per_language, per_language_at_end: sentences of each language, during the run and after its last step.
        group: sentences of one group; as many groups as micro-batches are in flight.
        max_length: tokens after which a translation ends anyway, its end-of-sentence token included.
        beam: hypotheses of each sentence that are kept, after the last step and in commands that translate; 1: greedy.
        beam_during_run: the same, in evaluations during the run.
        length_exponent: a translation y has the score log p(y) / ((|y| + 5) / 5)^length_exponent.
        length_ratio, length_extra: a translation ends anyway after length_ratio · source tokens + length_extra tokens.
    """

    per_language: int
    per_language_at_end: int
    group: int
    max_length: int
    beam: int = 8
    beam_during_run: int = 1
    length_exponent: float = 0.5
    length_ratio: float = 3.0
    length_extra: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError naming the key of a number that is too small or not whole."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            whole = name in WHOLE
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= least:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"task.generation.{name}={value}: use {kind}, at least {least}")
        if self.length_ratio == 0 and self.length_extra == 0:
            raise ValueError("task.generation.length_ratio=0 with length_extra=0 allows no token: raise one of them")

    @property
    def widest(self) -> int:
        """The wider of the two beams."""
        return max(self.beam, self.beam_during_run)

    def effort(self, at_end: bool) -> dict[str, int]:
        """How much is generated, by the names of reports: `sentences_per_language` and `beam`."""
        if at_end:
            return {"sentences_per_language": self.per_language_at_end, "beam": self.beam}
        return {"sentences_per_language": self.per_language, "beam": self.beam_during_run}

    def longest(self, source_tokens: int) -> int:
        """The most tokens of a translation of so many source tokens, the end-of-sentence token included."""
        return max(1, min(self.max_length, math.ceil(self.length_ratio * source_tokens) + self.length_extra))
