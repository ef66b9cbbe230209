"""Reads and writes a corpus of sentence pairs on disk: token ids in one array, vocabularies, held-out texts.

    store.json                      languages, the parts that were shuffled, counts of lengths; written last
    source.model, target.model      vocabularies, or .json; none of the target if both sides share one
    dev.jsonl, test.jsonl           [language, item, source, target] in each line
    defects.json                    {"counts": {language: {kind: count}}, …}: what was found when the store was made
    ids.npy                         uint16 or uint32: source ids, then target ids, of one pair after the other
    ends.npy                        int64: 0, and where each of these sequences ends in ids.npy

The pairs of one language follow those of the other. The arrays are mapped into memory. Opening a store reads store.json
and the vocabularies only, so neither time nor memory grows with the corpus; batches are formed without reading ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import TypedDict

from ..disk import write_whole
from ..json_files import json_rows, read_json
from .cache import GrowingArray, damaged, open_array
from .source import fingerprint_of
from .token_batches import width_of
from .vocabulary import FILES, read_both

FORMAT = 4  # raised when the same parameters would give other bytes
IDS, ENDS = "ids.npy", "ends.npy"
LONGEST = 65_535  # tokens of a sentence: lengths are stored in two bytes

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]
Ragged = tuple[Numbers, Numbers]
"""Token ids of several sequences, one after the other, and the length of each sequence."""


class HeldOutPair(NamedTuple):
    """Holds a held-out sentence; `item` is its number, equal for languages that translate the same English."""

    language: str
    item: int
    source: str
    target: str


@dataclass(frozen=True)
class Sizes:
    """Describes the layout of the pairs.

    Attributes:
        block: pairs that are read together, in random order; the order of the largest block is held in memory.
        shard: pairs that are shuffled together, a multiple of `block`; about 50 tokens per pair make 100 MB.
    """

    block: int = 65_536
    shard: int = 16 * 65_536


@dataclass(frozen=True)
class LanguageSummary:
    """Describes a language's training pairs in store.json.

    Attributes:
        shards: pairs of each part that was shuffled.
        widths: number of pairs, and of their target tokens with end tokens, for each padded target length.
    """

    shards: list[int]
    widths: dict[str, list[int]]

    @property
    def pairs(self) -> int:
        return sum(self.shards)


class StoreDescription(TypedDict):
    """Describes store.json."""

    block: Annotated[int, Field(ge=1)]
    languages: dict[str, LanguageSummary]
    made_of: dict[str, Any]


class Store:
    """Reads a corpus.

    Attributes:
        languages: the summary of each language, in the order of store.json.
        source_vocabulary, target_vocabulary: the same object if the sides share one.
        block: pairs of a block.
        drawn: number of pairs of training files that are held out for each split.
    """

    JSON = StoreDescription

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        description = read_json(folder / "store.json", StoreDescription)
        self.block, self.languages = description["block"], description["languages"]
        self.drawn: dict[str, int] = description["made_of"].get("drawn", {})
        self.source_vocabulary, self.target_vocabulary = read_both(folder)
        self._first = np.cumsum([0, *self.sizes.values()])  # pairs before each language
        self._ids, self._ends = (open_array(folder / name) for name in (IDS, ENDS))
        if (last := 2 * int(self._first[-1])) + 1 != len(self._ends) or self._ends[last] != len(self._ids):
            raise damaged(folder / ENDS, "it is not that of its ids")

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the number of training pairs of each language."""
        return {code: of.pairs for code, of in self.languages.items()}

    def fingerprint(self) -> str:
        """Returns a digest of the vocabularies and of each language's numbers of pairs and tokens of each length.

        The ids themselves are not read, because they may be of any number; a change that keeps all these numbers is
        not noticed.
        """
        files = (self.folder / name for name in sorted(FILES))
        vocabularies = [path.read_bytes() for path in files if path.is_file()]
        numbers = json.dumps([self.block, {code: asdict(of) for code, of in self.languages.items()}]).encode()
        return fingerprint_of(numbers, *vocabularies)

    def blocks(self) -> list[list[int]]:
        """Returns, for each language, the number of pairs in each of its blocks."""
        return [
            [min(self.block, pairs - first) for pairs in of.shards for first in range(0, pairs, self.block)]
            for of in self.languages.values()
        ]

    def locate(self, languages: Numbers, indices: Numbers) -> Numbers:
        """Returns the number in the store of pair `indices[i]` of language number `languages[i]`, for every i."""
        return np.asarray(self._first[languages] + indices)

    def lengths(self, pairs: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the tokens of each pair's source and target, without beginning and end tokens."""
        first, second, third = self._bounds(pairs)
        return second - first, third - second

    def gather(self, pairs: Numbers) -> tuple[Ragged, Ragged]:
        """Returns the ids of the pairs' sources and targets."""
        first, second, third = self._bounds(pairs)
        source, target = ((start, end - start) for start, end in ((first, second), (second, third)))
        return self._gather(*source), self._gather(*target)

    def _bounds(self, pairs: Numbers) -> list[Numbers]:
        """Returns where the source of each pair begins in the ids, where it ends, and where the target ends."""
        return [np.asarray(self._ends[2 * pairs + place]) for place in range(3)]

    def _gather(self, starts: Numbers, lengths: Numbers) -> Ragged:
        return self._ids[places_of(starts, lengths)].astype(np.int64), lengths

    def held_out(self, split: str) -> Iterator[HeldOutPair]:
        """Yields all held-out sentences of "dev" or "test", language after language."""
        return json_rows(self.folder / f"{split}.jsonl", HeldOutPair)


def interleave(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], wide: bool
) -> tuple[Tokens, Lengths]:
    """Returns the ids of pairs as a store holds them, and their lengths; `wide`: ids above 65,535 need four bytes."""
    lengths = np.array([(len(s), len(t)) for s, t in zip(sources, targets, strict=True)], np.uint16).reshape(-1, 2)
    ids = chain.from_iterable(chain.from_iterable(zip(sources, targets, strict=True)))
    return np.fromiter(ids, np.uint32 if wide else np.uint16, int(lengths.sum(dtype=np.int64))), lengths


def places_of(starts: Numbers, lengths: Numbers) -> Numbers:
    """Returns the places of the tokens of sequences that begin at `starts`, one sequence after the other."""
    offsets = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return np.asarray(offsets + np.arange(len(offsets)))


def pair_ends(lengths: Lengths) -> Numbers:
    """Returns 0 and, for each pair, where it ends in tokens."""
    return np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))])


class StoreWriter:
    """Writes the pairs of a store, language after language, and then store.json.

    Args:
        folder: that becomes the store.
        wide: whether there are ids above 65,535, which need four bytes.

    Attributes:
        languages: the summary of each language so far.
    """

    def __init__(self, folder: Path, wide: bool) -> None:
        self._folder = folder
        self._ids = GrowingArray(folder / IDS, np.uint32 if wide else np.uint16)
        self._ends = GrowingArray(folder / ENDS, np.int64)
        self._ends.append(np.zeros(1, np.int64))
        self.languages: dict[str, LanguageSummary] = {}

    def add(self, language: str, tokens: Tokens, lengths: Lengths) -> None:
        """Writes further pairs of the last language or a new one, in the order given, see `interleave`."""
        summary = self.languages.setdefault(language, LanguageSummary([], {}))
        summary.shards.append(len(lengths))
        targets = lengths[:, 1].astype(np.int64) + 1
        widths = width_of(targets)
        for width in np.unique(widths).tolist():
            chosen, before = targets[widths == width], summary.widths.get(str(width), (0, 0))
            summary.widths[str(width)] = [before[0] + len(chosen), before[1] + int(chosen.sum())]
        self._ends.append(self._ids.size + np.cumsum(lengths.reshape(-1), dtype=np.int64))
        self._ids.append(tokens)

    def finish(self, block: int, made_of: Mapping[str, object]) -> None:
        """Closes the arrays and writes store.json, which makes the folder a store."""
        self._ids.close()
        self._ends.close()
        summaries = {
            code: {"shards": of.shards, "widths": {width: of.widths[width] for width in sorted(of.widths, key=int)}}
            for code, of in self.languages.items()
        }
        description = {"format": FORMAT, "block": block, "languages": summaries, "made_of": made_of}
        write_whole(self._folder / "store.json", json.dumps(description, indent=1, ensure_ascii=False))
