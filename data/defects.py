"""Counts the defects of a text corpus, each with its file and line: dropped, kept or refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from ..errors import ConfigurationError, in_utf8
from ..json_files import read_json

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
NO_LINES = ("no_dev", "byte_order_mark")  # kinds by which no line is lost
KEEPABLE = ("held_out", "copied")  # kinds of pairs that can be trained on
DEFAULTS = {**dict.fromkeys(KINDS, "drop"), "misaligned": "refuse", "copied": "keep"}
EXAMPLES = 20  # of each kind and language, listed in defects.json


@dataclass(frozen=True)
class Defect:
    """Describes one defect: file, line (from 1; 0: the whole file), and the text found there."""

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


class Counted(TypedDict):
    """Describes defects in a file: how many by language and kind, and the first ones of each."""

    counts: dict[str, dict[str, int]]
    defects: NotRequired[list[Defect]]


class Found(Counted):
    """Describes defects.json; see `Defects.write`."""

    lines: NotRequired[int]
    corpora: NotRequired[dict[str, dict[str, list[int]]]]


class Defects:
    """Counts the defects of a corpus or a part of it by language and kind, and keeps the first ones of each."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.examples: list[Defect] = []
        self._listed = Counter[tuple[str, str]]()

    def add(self, defect: Defect) -> None:
        self.counts.setdefault(defect.language, Counter())[defect.kind] += 1
        self._list(defect)

    def update(self, others: Counted, policy: Mapping[str, str]) -> None:
        """Adds others; raises ConfigurationError for the first that the policy refuses."""
        for language, counts in others["counts"].items():
            self.counts.setdefault(language, Counter()).update(counts)
        for defect in others.get("defects", ()):
            self._list(defect)
        self.refuse(policy)

    def _list(self, defect: Defect) -> None:
        if self._listed[defect.language, defect.kind] < EXAMPLES:
            self._listed[defect.language, defect.kind] += 1
            self.examples.append(defect)

    def refuse(self, policy: Mapping[str, str]) -> None:
        """Raises ConfigurationError for the first defect that the policy refuses."""
        for of in self.examples:
            if policy.get(of.kind) == "refuse":
                raise ConfigurationError(
                    f"{of}. Mend the file, or go on without it: data.on_defect.{of.kind}=drop, not data.strict"
                )

    def totals(self) -> dict[str, int]:
        """Returns the number of each kind, in all languages."""
        return dict(sum(self.counts.values(), Counter[str]()))

    def in_words(self, policy: Mapping[str, str]) -> str:
        """Returns "dropped 3 empty, 1 too long; kept 2 copied; such as …", an example of each kind; "" without any."""
        totals = self.totals()
        parts = []
        for did, word, are_pairs in (("dropped", "drop", True), ("kept", "keep", True), ("found", "drop", False)):
            if kinds := sorted(of for of in totals if policy.get(of) == word and (of not in NO_LINES) == are_pairs):
                parts.append(f"{did} {', '.join(f'{totals[kind]:,} {kind}' for kind in kinds)}".replace("_", " "))
        first = {one.kind: str(one) for one in reversed(self.examples) if policy.get(one.kind) == "drop"}
        if first:
            parts.append(f"such as {'; '.join(first[kind] for kind in sorted(first))}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        examples = [{**vars(of), "file": in_utf8(of.file), "found": in_utf8(of.found)} for of in self.examples]
        return {"counts": self.counts, "defects": examples}

    def write(self, store: Path, lines: int, corpora: Mapping[str, Mapping[str, list[int]]] | None = None) -> None:
        """Writes defects.json.

        Args:
            lines: of the training text, pairs of lines or documents.
            corpora: by language and file, pairs used and lines, where a language has several.
        """
        counted = {"lines": lines, **({"corpora": corpora} if corpora else {})}
        text = json.dumps({**counted, **self.as_json()}, indent=1, ensure_ascii=False, sort_keys=True)
        (store / DEFECTS).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, store: Path) -> tuple[Defects, Found]:
        """Returns the defects found when a store was made, and all of defects.json."""
        found, content = cls(), read_json(store / DEFECTS, Found)
        found.update(content, {})
        return found, content
