"""Counts what is wrong with a text corpus: each defect with its file and line; dropped, kept or refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

DEFECTS = "defects.json"  # in a store
KINDS = {  # what is said of the line
    "misaligned": "has no line beside it",
    "undecodable": "is not UTF-8",
    "nul": "has a NUL byte",
    "malformed": "has not exactly one tab",
    "empty": "is empty",
    "too_long": "is too long",
    "byte_order_mark": "begins with a byte order mark",
    "held_out": "is in the dev or test set, too",
    "copied": "has a source that equals its target",
    "no_dev": "has no dev set",
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
        return f"{self.file}, line {self.line}: {self.found}" if self.line else f"{self.file}: {self.found}"


def check_policy(
    on_defect: Mapping[str, str], kinds: Collection[str] = tuple(KINDS), strict: bool = False
) -> dict[str, str]:
    """Returns "drop", "keep" or "refuse" for each kind of defect, from the key `data.on_defect`.

    Args:
        on_defect: by kind; `DEFAULTS` holds the others.
        kinds: those that a text of this sort can have.
        strict: what would be dropped is refused, the key `data.strict`.

    Raises:
        ConfigurationError: a kind or word is unknown.
    """
    policy = {**{kind: DEFAULTS[kind] for kind in kinds}, **on_defect}
    for kind, word in policy.items():
        if kind not in kinds:
            raise ConfigurationError(f"data.on_defect.{kind}: there are only {', '.join(kinds)}")
        words = ("drop", "keep", "refuse") if kind in KEEPABLE else ("drop", "refuse")
        if word not in words:
            raise ConfigurationError(f"data.on_defect.{kind}={word}: use {' or '.join(words)}")
    return {kind: "refuse" if strict and word == "drop" else word for kind, word in policy.items()}


class Defects:
    """Counts the defects of a corpus or a part of it by language and kind, and keeps the first ones of each."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.examples: list[Defect] = []
        self._listed = Counter[tuple[str, str]]()

    def add(self, defect: Defect) -> None:
        self.counts.setdefault(defect.language, Counter())[defect.kind] += 1
        self._list(defect)

    def update(self, other: Defects, policy: Mapping[str, str]) -> None:
        """Adds others; raises ConfigurationError for the first of all that the policy refuses."""
        for language, counts in other.counts.items():
            self.counts.setdefault(language, Counter()).update(counts)
        for defect in other.examples:
            self._list(defect)
        self.refuse(policy)

    def _list(self, defect: Defect) -> None:
        if self._listed[defect.language, defect.kind] < EXAMPLES:
            self._listed[defect.language, defect.kind] += 1
            self.examples.append(defect)

    def refuse(self, policy: Mapping[str, str]) -> None:
        """Raises ConfigurationError for the first defect that the policy refuses."""
        for of in self.examples:
            if policy[of.kind] == "refuse":
                raise ConfigurationError(
                    f"{of}. Mend the file, or go on without it: data.on_defect.{of.kind}=drop, not data.strict"
                )

    def as_json(self) -> dict[str, Any]:
        return {"counts": self.counts, "defects": [vars(defect) for defect in self.examples]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Defects:
        found = cls()
        found.counts = {language: Counter(counts) for language, counts in content["counts"].items()}
        for defect in content["defects"]:
            found._list(Defect(**defect))
        return found

    def write(self, store: Path, lines: int, corpora: Mapping[str, Mapping[str, list[int]]] | None = None) -> None:
        """Writes defects.json.

        Args:
            lines: of the training text, pairs of lines or documents.
            corpora: by language and file, pairs used and lines, where a language has several.
        """
        counted = {"lines": lines, **({"corpora": corpora} if corpora else {})}
        text = json.dumps({**counted, **self.as_json()}, indent=1, ensure_ascii=False, sort_keys=True)
        (store / DEFECTS).write_text(text, encoding="utf-8")


def defects_of(store: Path) -> dict[str, int]:
    """Returns how many defects of each kind were found when a store was made."""
    content = json.loads((store / DEFECTS).read_text(encoding="utf-8"))
    return dict(sum(map(Counter, content["counts"].values()), Counter[str]()))


def corpora_of(store: Path) -> dict[str, dict[str, list[int]]]:
    """Returns, by language and file, the pairs used and the lines of the corpora of languages that have several."""
    content: dict[str, dict[str, dict[str, list[int]]]] = json.loads((store / DEFECTS).read_text(encoding="utf-8"))
    return content.get("corpora", {})


def defect_notice(store: Path, policy: Mapping[str, str], used: str) -> str | None:
    """Returns a warning of what was left out when a store was made, with an example of each kind; None: nothing was.

    Args:
        used: what was not, in words; {lines} becomes the number of lines.

    Raises:
        ConfigurationError: it was made with defects dropped that are to be refused now.
    """
    content = json.loads((store / DEFECTS).read_text(encoding="utf-8"))
    defects = Defects.from_json(content)
    defects.refuse(policy)
    found = in_words(defects_of(store), policy)
    first = {one.kind: str(one) for one in reversed(defects.examples) if policy[one.kind] == "drop"}
    such_as = f"; such as {'; '.join(first[kind] for kind in sorted(first))}" if first else ""
    used = used.format(lines=f"{content['lines']:,}")
    return f"{used}: {found}{such_as}; which ones: {store / DEFECTS}" if found else None


def in_words(counts: Mapping[str, int], policy: Mapping[str, str]) -> str:
    """Returns counts by kind, "dropped 3 empty, 1 too long; kept 2 copied", or an empty text if there are none."""
    parts = []
    for word, did in (("drop", "dropped"), ("keep", "kept")):
        kinds = sorted(kind for kind, count in counts.items() if count and policy[kind] == word)
        if kinds:
            parts.append(f"{did} {', '.join(f'{counts[kind]:,} {kind}' for kind in kinds)}".replace("_", " "))
    return "; ".join(parts)
