"""Reads and writes a corpus of sentence pairs on disk: token ids in one array, vocabularies, held-out texts.

    store.json                      languages, the parts that were shuffled, counts of lengths, defects of the text
    source.model, target.model      vocabularies, or .json; none of the target if both sides share one
    held_out.jsonl                  [split, language, source, reference] in each line
    ids                             uint16 or uint32: source ids, then target ids, of one pair after the other
    ends                            int64: 0, and where each of these sequences ends in ids

The pairs of one language follow those of the other. The arrays are mapped into memory. Opening a store reads store.json
and the vocabularies only, so neither time nor memory grows with the corpus; batches are formed without reading ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import TypedDict

from ..json_files import json_rows, read_json
from .cache import append, open_array
from .defects import Defects
from .sampling import width_of
from .source import HeldOutSample, fingerprint_of
from .vocabulary import FILES, read_both

FORMAT = 6  # raised when the same parameters would give other bytes
IDS, ENDS, HELD_OUT = "ids", "ends", "held_out.jsonl"
LONGEST = 65_535  # tokens of a sentence: lengths are stored in two bytes
BLOCK = 65_536  # pairs that are read together, in random order; the order of the largest block is held in memory

Tokens = npt.NDArray[np.unsignedinteger[Any]]
TokenKind = type[np.unsignedinteger[Any]]
Lengths = npt.NDArray[np.uint16]
Pairs = tuple[Tokens, Lengths]
Numbers = npt.NDArray[np.int64]


def token_kind(*vocabularies: Sized) -> TokenKind:
    """Returns the type of the ids in a store: ids above 65,535 need four bytes."""
    return np.uint32 if max(map(len, vocabularies)) > 65_536 else np.uint16


@dataclass(frozen=True)
class LanguageSummary:
    """Describes a language's training pairs in store.json.

    Attributes:
        shards: number of pairs in each part that was shuffled.
        widths: padded target length -> [pairs of this length, their target tokens with end tokens].
    """

    shards: list[int]
    widths: dict[str, list[int]]

    @property
    def pairs(self) -> int:
        return sum(self.shards)


class StoreDescription(TypedDict):
    """Describes store.json; `lines`: pairs of lines that were read."""

    block: Annotated[int, Field(ge=1)]
    languages: dict[str, LanguageSummary]
    lines: int
    defects: Defects


class Store:
    """Reads a corpus.

    Attributes:
        languages: the summary of each language, in the order of store.json.
        source_vocabulary, target_vocabulary: the same object if the sides share one.
        block: pairs of a block.
        lines: pairs of lines of the training files.
        defects: found when the store was made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        description = read_json(folder / "store.json", StoreDescription)
        self.block, self.languages = description["block"], description["languages"]
        self.lines, self.defects = description["lines"], description["defects"]
        self.source_vocabulary, self.target_vocabulary = read_both(folder)
        self._first = np.cumsum([0, *self.sizes.values()])  # pairs before each language
        kind = token_kind(self.source_vocabulary, self.target_vocabulary)
        self._ids, self._ends = open_array(folder / IDS, kind), open_array(folder / ENDS, np.int64)

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the number of training pairs of each language."""
        return {code: summary.pairs for code, summary in self.languages.items()}

    def fingerprint(self) -> str:
        """Returns a digest of the vocabularies, and of how many pairs and tokens of each length a language has.

        The ids are not read, because there may be very many. A change that keeps all these numbers is not noticed.
        """
        vocabularies = [path.read_bytes() for name in sorted(FILES) if (path := self.folder / name).is_file()]
        summaries = {code: asdict(summary) for code, summary in self.languages.items()}
        return fingerprint_of(json.dumps([self.block, summaries]).encode(), *vocabularies)

    def blocks(self) -> list[list[int]]:
        """Returns, for each language, the number of pairs in each of its blocks."""
        return [
            [min(self.block, pairs - first) for pairs in of.shards for first in range(0, pairs, self.block)]
            for of in self.languages.values()
        ]

    def locate(self, languages: Numbers, indices: Numbers) -> Numbers:
        """Returns, for every i, the store's number of pair `indices[i]` of language number `languages[i]`."""
        return np.asarray(self._first[languages] + indices)

    def lengths(self, pairs: Numbers) -> Numbers:
        """Returns the tokens of each pair's source and target [pairs, 2], without beginning and end tokens."""
        return np.stack([self._ends[2 * pairs + side + 1] - self._ends[2 * pairs + side] for side in (0, 1)], axis=1)

    def gather(self, pairs: Numbers) -> tuple[list[Tokens], list[Tokens]]:
        """Returns the ids of each pair's source and of each pair's target."""
        # All texts lie one behind the other: source, target, source, target, ...
        starts, middles, stops = (self._ends[2 * pairs + place].tolist() for place in range(3))
        sources = [self._ids[first:last] for first, last in zip(starts, middles, strict=True)]
        return sources, [self._ids[first:last] for first, last in zip(middles, stops, strict=True)]

    def held_out(self, split: str) -> Iterator[HeldOutSample]:
        """Yields all held-out sentences of "dev" or "test", language after language, without their ids."""
        return (sample for sample in json_rows(self.folder / HELD_OUT, HeldOutSample) if sample.split == split)


def interleave(pairs: Sequence[Sequence[Sequence[int]]], kind: TokenKind) -> Pairs:
    """Returns the ids of all pairs (source, target) in one array, source before target, and the lengths [pairs, 2]."""
    lengths = np.array([[len(ids) for ids in pair] for pair in pairs], np.uint16).reshape(-1, 2)
    ids = chain.from_iterable(chain.from_iterable(pairs))
    return np.fromiter(ids, kind, int(lengths.sum(dtype=np.int64))), lengths


def shuffled(tokens: Tokens, lengths: Lengths, order: Numbers) -> Pairs:
    """Returns the pairs of these numbers, in their order; for tokens and lengths see `interleave`."""
    sizes = lengths.sum(1, dtype=np.int64)
    ends = np.cumsum(sizes)
    bounds = zip((ends - sizes)[order].tolist(), ends[order].tolist(), strict=True)
    return np.concatenate([tokens[first:last] for first, last in bounds]), lengths[order]


class StoreWriter:
    """Writes the pairs of a store, language after language, and then store.json.

    Args:
        folder: becomes the store.

    Attributes:
        languages: the summary of each language so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._tokens = folder, 0
        append(folder / ENDS, np.zeros(1, np.int64))
        self.languages: dict[str, LanguageSummary] = {}

    def add(self, language: str, tokens: Tokens, lengths: Lengths) -> None:
        """Writes further pairs of the last language, or of a new one, in the given order (form: `interleave`)."""
        summary = self.languages.setdefault(language, LanguageSummary([], {}))
        summary.shards.append(len(lengths))
        targets = lengths[:, 1].astype(np.int64) + 1
        widths = width_of(targets)
        for width in np.unique(widths).tolist():
            chosen, before = targets[widths == width], summary.widths.get(str(width), (0, 0))
            summary.widths[str(width)] = [before[0] + len(chosen), before[1] + int(chosen.sum())]
        append(self._folder / ENDS, self._tokens + np.cumsum(lengths.reshape(-1), dtype=np.int64))
        append(self._folder / IDS, tokens)
        self._tokens += len(tokens)

    def finish(self, held_out: Sequence[HeldOutSample], defects: Defects, block: int = BLOCK, lines: int = 0) -> None:
        """Writes the held-out pairs, and store.json, see `StoreDescription`."""
        rows = "".join(json.dumps(sample[:4], ensure_ascii=False) + "\n" for sample in held_out)
        (self._folder / HELD_OUT).write_text(rows, encoding="utf-8")
        summaries = {
            code: {"shards": of.shards, "widths": {width: of.widths[width] for width in sorted(of.widths, key=int)}}
            for code, of in self.languages.items()
        }
        about = {"format": FORMAT, "block": block, "lines": lines, "defects": vars(defects)}
        text = json.dumps({**about, "languages": summaries}, indent=1, ensure_ascii=False)
        (self._folder / "store.json").write_text(text, encoding="utf-8")
