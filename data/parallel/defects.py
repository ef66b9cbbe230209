"""What is wrong with a text corpus: each defect named with its file and line, counted, dropped or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigurationError

KINDS = {
    "misaligned": "files of a pair with different numbers of lines; dropped: the whole pair of files",
    "undecodable": "a line that is not UTF-8",
    "malformed": "a line of a TSV file without exactly one tab",
    "empty": "an empty line on a side",
    "too_long": "more tokens on a side than data.max_length",
    "no_dev": "a language without a dev set; dropped: trained on, never evaluated",
}
DEFAULTS = {kind: "refuse" if kind == "misaligned" else "drop" for kind in KINDS}
EXAMPLES = 20  # of each kind and language, named in defects.json


@dataclass(frozen=True)
class Defect:
    """One place: file, line (from 1; 0: the whole file), and what was found there."""

    kind: str
    language: str
    file: str
    line: int
    found: str

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.found}"


def check_policy(on_defect: str | Mapping[str, str]) -> dict[str, str]:
    """What to do with each kind of defect, from the key `data.on_defect`: one word for all, or a word for each.

    Raises:
        ConfigurationError: an unknown kind or word.
    """
    policy = dict.fromkeys(KINDS, on_defect) if isinstance(on_defect, str) else {**DEFAULTS, **on_defect}
    for kind, word in policy.items():
        if kind not in KINDS:
            raise ConfigurationError(f"data.on_defect.{kind}: there are only {', '.join(KINDS)}")
        if word not in ("drop", "refuse"):
            raise ConfigurationError(f"data.on_defect.{kind}={word}: use drop or refuse")
    return policy


@dataclass
class Ledger:
    """All defects of a corpus: every one counted, the first of each kind and language named."""

    policy: Mapping[str, str]
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: list[Defect] = field(default_factory=list)

    def check(self, defect: Defect) -> None:
        """Raises:
        ConfigurationError: the defect is to be refused.
        """
        if self.policy[defect.kind] == "refuse":
            raise refusal(defect)

    def add(self, defects: list[Defect], counts: Mapping[str, Mapping[str, int]]) -> None:
        """Enter the defects of a part of the corpus.

        Args:
            defects: the first ones, in the corpus' order.
            counts: of each language, how many of each kind there are.

        Raises:
            ConfigurationError: one of them is to be refused.
        """
        for defect in defects:
            self.check(defect)
        for language, of_language in counts.items():
            self.counts.setdefault(language, Counter()).update(of_language)
        for defect in defects:
            named = sum((other.kind, other.language) == (defect.kind, defect.language) for other in self.examples)
            if named < EXAMPLES:
                self.examples.append(defect)

    def as_json(self) -> dict[str, Any]:
        """What defects.json says."""
        return {
            "meaning": {kind: KINDS[kind] for kind in sorted(self.total())},
            "counts": {language: dict(sorted(of.items())) for language, of in sorted(self.counts.items()) if of},
            "named": f"the first {EXAMPLES} of each kind and language",
            "defects": [vars(defect) for defect in self.examples],
        }

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter[str]())

    def summary(self) -> str:
        """In words: "dropped 3 empty, 1 too long"; empty where all was well."""
        named = [f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(self.total().items())]
        return f"dropped {', '.join(named)}" if named else ""


def refusal(defect: Defect) -> ConfigurationError:
    """The error for a defect that is not to be dropped."""
    return ConfigurationError(
        f"{defect}. Mend the file, or use data.on_defect.{defect.kind}=drop ({KINDS[defect.kind]})"
    )
