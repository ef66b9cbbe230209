"""Counts the lines of a text corpus that have a defect."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..errors import in_utf8

KINDS = {  # what a message says of the line
    "undecodable": "is not UTF-8",
    "nul": "has a NUL byte",
    "malformed": "has not exactly one tab",
    "empty": "is empty",
    "too_long": "is too long",
    "held_out": "is in the dev or test set, too",
    "copied": "has a source that equals its target",
    "no_dev": "has no dev set",
}
KEPT = "copied"  # a defect of pairs that are trained on all the same
DID = {KEPT: "kept", "no_dev": "found"}  # what was done with a line; one of another kind is dropped


class BadLine(ValueError):
    """Raised for a line that cannot be used.

    Attributes:
        kind: one of `KINDS`.
        side: 0 for a line of the source, or of a file of both sides; 1 for one of the target.
    """

    def __init__(self, kind: str, found: str | None = None, side: int = 0) -> None:
        super().__init__(found or KINDS[kind])
        self.kind, self.side = kind, side


@dataclass
class Defects:
    """Counts defects by kind.

    Attributes:
        counts: number of lines of each kind.
        first: the first line of each kind, with its place, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, where: str, found: object = None) -> None:
        """Counts a defect.

        Args:
            where: its place, as "a.txt, line 3".
            found: description of what was found there; None: that of `KINDS`.
        """
        self.counts[kind] += 1
        self.first.setdefault(kind, in_utf8(f"{where}: {found or KINDS[kind]}"))

    def update(self, others: Defects) -> None:
        """Adds those of a later part of the corpus."""
        self.counts.update(others.counts)
        self.first = {**others.first, **self.first}

    def in_words(self) -> str:
        """Returns counts and an example of each kind, "dropped 3 empty; kept 2 copied; such as …"; "" without any."""
        parts = []
        for word in ("dropped", "kept", "found"):
            if kinds := sorted(kind for kind in self.counts if DID.get(kind, "dropped") == word):
                parts.append(f"{word} {', '.join(f'{self.counts[kind]:,} {kind}' for kind in kinds)}".replace("_", " "))
        if examples := [self.first[kind] for kind in sorted(self.first) if kind != KEPT]:
            parts.append(f"such as {'; '.join(examples)}")
        return "; ".join(parts)
