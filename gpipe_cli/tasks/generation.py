"""How much a task generates when it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationSettings:
    """The attribute ``generation`` of a task that generates.

    Attributes:
        per_language, per_language_at_end: sentences of each language, during the run and after its last step.
        group: sentences of one group; as many groups as micro-batches are in flight.
        max_length: tokens after which a sentence ends anyway.
    """

    per_language: int
    per_language_at_end: int
    group: int
    max_length: int

    def __post_init__(self) -> None:
        """Raises ValueError naming the key of a number that is too small."""
        for name, least in (("per_language", 1), ("per_language_at_end", 1), ("group", 1), ("max_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"task.generation.{name}={getattr(self, name)}: use a whole number, at least {least}")
