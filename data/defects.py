"""Counts what is wrong with a text corpus: each defect with its file and line; dropped, kept or refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

DEFECTS = "defects.json"  # in a store
KINDS = {
    "misaligned": "files of a pair with different numbers of lines; dropped: the whole pair of files",
    "undecodable": "a line that is not UTF-8",
    "nul": "a line with a NUL byte",
    "malformed": "a line of a TSV file without exactly one tab; a line of JSON without the text",
    "empty": "a line that is empty on a side; an empty text in a line of JSON",
    "too_long": "more tokens on a side than data.max_length; a line of plain text of many megabytes",
    "byte_order_mark": "a line that begins with a byte order mark; dropped: the mark alone",
    "held_out": "a training pair that is in the dev or test set of its language, too",
    "copied": "a training pair whose source equals its target",
    "no_dev": "a language without a dev set; dropped: trained on, never evaluated",
}
OF_TEXT = ("undecodable", "nul", "malformed", "empty", "too_long", "byte_order_mark")  # kinds in text of one side
KEEPABLE = ("held_out", "copied")  # kinds of pairs that can be trained on
DEFAULTS = {**dict.fromkeys(KINDS, "drop"), "misaligned": "refuse", "copied": "keep"}
EXAMPLES = 20  # of each kind and language, listed in defects.json


@dataclass(frozen=True)
class Defect:
    """Describes one defect: file, line (from 1; 0: the whole file), and what was found there."""

    kind: str
    language: str
    file: str
    line: int
    found: str

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.found}"


def check_policy(on_defect: str | Mapping[str, str], kinds: Collection[str] = tuple(KINDS)) -> dict[str, str]:
    """Returns "drop", "keep" or "refuse" for each kind of defect, from the key `data.on_defect`.

    Args:
        on_defect: one word for all kinds, or a word for each; `DEFAULTS` holds the others.
        kinds: those that a text of this sort can have.

    Raises:
        ConfigurationError: a kind or word is unknown.
    """
    defaults = {kind: DEFAULTS[kind] for kind in kinds}
    policy = dict.fromkeys(kinds, on_defect) if isinstance(on_defect, str) else {**defaults, **on_defect}
    for kind, word in policy.items():
        if kind not in kinds:
            raise ConfigurationError(f"data.on_defect.{kind}: there are only {', '.join(kinds)}")
        words = ("drop", "keep", "refuse") if kind in KEEPABLE else ("drop", "refuse")
        if word not in words:
            raise ConfigurationError(f"data.on_defect.{kind}={word}: use {' or '.join(words)}")
    return policy


@dataclass
class DefectCount:
    """Counts the defects of one language by kind and keeps the first ones of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[Defect] = field(default_factory=list)

    def add(self, defect: Defect) -> None:
        self.counts[defect.kind] += 1
        if self.counts[defect.kind] <= EXAMPLES:
            self.examples.append(defect)

    def update(self, other: DefectCount) -> None:
        self.counts.update(other.counts)
        for defect in other.examples:
            if sum(known.kind == defect.kind for known in self.examples) < EXAMPLES:
                self.examples.append(defect)

    def as_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "defects": [vars(defect) for defect in self.examples]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DefectCount:
        return cls(Counter(content["counts"]), [Defect(**defect) for defect in content["defects"]])


class Ledger:
    """Counts all defects of a corpus and refuses those that the policy refuses."""

    def __init__(self, policy: Mapping[str, str]) -> None:
        self._policy = policy
        self._languages: dict[str, DefectCount] = {}

    def check(self, found: DefectCount) -> None:
        """Raises ConfigurationError for the first defect that is to be refused."""
        _refuse(found.examples, self._policy)

    def add(self, language: str, found: DefectCount) -> None:
        """Enters the defects of a part of the corpus.

        Raises:
            ConfigurationError: one of them is to be refused.
        """
        self.check(found)
        self._languages.setdefault(language, DefectCount()).update(found)

    def write(self, store: Path, lines: int) -> None:
        """Writes defects.json; ``lines``: of the training text, pairs of lines or documents."""
        languages = sorted((language, found) for language, found in self._languages.items() if found.counts)
        content = {
            "lines": lines,
            "meaning": {kind: KINDS[kind] for kind in sorted(self.total())},
            "counts": {language: dict(sorted(found.counts.items())) for language, found in languages},
            "named": f"the first {EXAMPLES} of each kind and language",
            "defects": [vars(defect) for _, found in languages for defect in found.examples],
        }
        (store / DEFECTS).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")

    def total(self) -> Counter[str]:
        return sum((found.counts for found in self._languages.values()), Counter[str]())

    def summary(self) -> str:
        """Returns the counts in words; see `_in_words`."""
        return _in_words(self.total(), self._policy)


def defects_of(store: Path) -> dict[str, int]:
    """Returns how many defects of each kind were found when a store was made."""
    content = json.loads((store / DEFECTS).read_text(encoding="utf-8"))
    return dict(sum(map(Counter, content["counts"].values()), Counter[str]()))


def defect_notice(store: Path, policy: Mapping[str, str], used: str) -> str | None:
    """Returns a warning of what was left out when a store was made; None: nothing was.

    Args:
        used: what was not, in words; {lines} becomes the number of lines.

    Raises:
        ConfigurationError: it was made with defects dropped that are to be refused now.
    """
    content = json.loads((store / DEFECTS).read_text(encoding="utf-8"))
    _refuse([Defect(**defect) for defect in content["defects"]], policy)
    found = _in_words(defects_of(store), policy)
    used = used.format(lines=f"{content['lines']:,}")
    return f"{used}: {found}; which ones: {store / DEFECTS}" if found else None


def _in_words(counts: Mapping[str, int], policy: Mapping[str, str]) -> str:
    """Returns counts by kind, "dropped 3 empty, 1 too long; kept 2 copied", or an empty text if there are none."""
    parts = []
    for word, did in (("drop", "dropped"), ("keep", "kept")):
        kinds = sorted(kind for kind, count in counts.items() if count and policy[kind] == word)
        if kinds:
            parts.append(f"{did} {', '.join(f'{counts[kind]:,} {kind}' for kind in kinds)}".replace("_", " "))
    return "; ".join(parts)


def _refuse(defects: list[Defect], policy: Mapping[str, str]) -> None:
    """Raises ConfigurationError for the first defect that the policy refuses."""
    for defect in defects:
        if policy[defect.kind] == "refuse":
            raise ConfigurationError(
                f"{defect}. Mend the file, or use data.on_defect.{defect.kind}=drop ({KINDS[defect.kind]})"
            )
