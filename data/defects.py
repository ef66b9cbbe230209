"""Counts the defects of a text corpus, each with its file and line: dropped or, with `data.strict`, refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from ..errors import ConfigurationError, in_utf8
from ..json_files import read_json

DEFECTS = "defects.json"  # in a store
KINDS = {  # what is said of the line
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
NO_LINES = ("no_dev", "byte_order_mark")  # kinds by which no line is lost
KEPT = "copied"  # the kind of pairs that are trained on
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
        return in_utf8(f"{self.file}, line {self.line}: {self.found}" if self.line else f"{self.file}: {self.found}")


class Found(TypedDict):
    """Describes defects.json: how many by language and kind, the first ones of each, and the lines of the text."""

    counts: dict[str, dict[str, int]]
    defects: NotRequired[list[Defect]]
    lines: NotRequired[int]


class Defects:
    """Counts the defects of a corpus or a part of it by language and kind, and keeps the first ones of each."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.examples: list[Defect] = []
        self._listed = Counter[tuple[str, str]]()

    def add(self, defect: Defect) -> None:
        self.counts.setdefault(defect.language, Counter())[defect.kind] += 1
        self._list(defect)

    def update(self, others: Defects, strict: bool) -> None:
        """Adds others; see `refuse`."""
        for language, counts in others.counts.items():
            self.counts.setdefault(language, Counter()).update(counts)
        for defect in others.examples:
            self._list(defect)
        self.refuse(strict)

    def _list(self, defect: Defect) -> None:
        if self._listed[defect.language, defect.kind] < EXAMPLES:
            self._listed[defect.language, defect.kind] += 1
            self.examples.append(defect)

    def refuse(self, strict: bool) -> None:
        """Raises ConfigurationError for the first line that is left out, which `data.strict` refuses."""
        if strict and (found := next((of for of in self.examples if of.kind not in (KEPT, *NO_LINES)), None)):
            raise ConfigurationError(f"{found}. Mend the file, or go on without it: data.strict=false")

    def totals(self) -> dict[str, int]:
        """Returns the number of each kind, in all languages."""
        return dict(sum(self.counts.values(), Counter[str]()))

    def in_words(self) -> str:
        """Returns "dropped 3 empty, 1 too long; kept 2 copied; such as …", an example of each kind; "" without any."""
        totals, did = self.totals(), {KEPT: "kept", **dict.fromkeys(NO_LINES, "found")}
        parts = []
        for word in ("dropped", "kept", "found"):
            if kinds := sorted(kind for kind in totals if did.get(kind, "dropped") == word):
                parts.append(f"{word} {', '.join(f'{totals[kind]:,} {kind}' for kind in kinds)}".replace("_", " "))
        first = {one.kind: str(one) for one in reversed(self.examples) if one.kind != KEPT}
        if first:
            parts.append(f"such as {'; '.join(first[kind] for kind in sorted(first))}")
        return "; ".join(parts)

    def write(self, store: Path, lines: int) -> None:
        """Writes defects.json; ``lines``: of the training text, pairs of lines or documents."""
        examples = [{**vars(of), "file": in_utf8(of.file), "found": in_utf8(of.found)} for of in self.examples]
        content = {"lines": lines, "counts": self.counts, "defects": examples}
        text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
        (store / DEFECTS).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, store: Path) -> tuple[Defects, Found]:
        """Returns the defects found when a store was made, and all of defects.json."""
        found, content = cls(), read_json(store / DEFECTS, Found)
        found.counts = {language: Counter(counts) for language, counts in content["counts"].items()}
        found.examples = content.get("defects", [])
        return found, content
