"""Reads and writes a corpus of sentence pairs on disk: token ids in memory-mapped shards, vocabularies, held-out texts.

    store.json                      languages, their shards, the lengths of their sentences; written last
    source.model, target.model      vocabularies, or .json; none of the target if both sides share one
    dev.jsonl, test.jsonl           [language, item, source, target] in each line
    defects.json                    {"counts": {language: {kind: count}}, …}: what was found when the store was made
    train/<language>-<n>.tokens.npy      uint16 or uint32: source ids, then target ids, of one pair after the other
    train/<language>-<n>.lengths.npy     uint16 (pairs, 2)
    train/<language>-<n>.starts.npy      int64: where each block of pairs begins in tokens, and where the last one ends

The arrays are in numpy's own format, which is mapped in a tenth of a millisecond. Opening a store reads store.json and
the vocabularies only, so neither time nor memory grows with the corpus. Lengths are kept apart from the ids, so
that batches are formed without reading a sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from .cache import damaged, mapped_array, save_array
from .source import fingerprint_of
from .token_batches import width_of
from .vocabulary import FILES, read_both

FORMAT = 3  # raised when the same parameters would give other bytes
LONGEST = 65_535  # tokens of a sentence: lengths are stored in two bytes

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]
"""Where pairs lie, of the type `ROW`."""
Ragged = tuple[Numbers, Numbers]
"""Token ids of several sequences, one after the other, and the length of each sequence."""


# The number of the file, counted over all languages; that of the first source token in it; and the tokens of each side,
# without beginning and end tokens.
ROW = np.dtype([("shard", np.int32), ("offset", np.int64), ("source", np.int64), ("target", np.int64)])


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
        shard: pairs of a file, a multiple of `block`; about 50 tokens per pair make files of 100 MB.
    """

    block: int = 65_536
    shard: int = 16 * 65_536


@dataclass(frozen=True)
class LanguageSummary:
    """Describes a language's training pairs in store.json.

    Attributes:
        shards: pairs of each file.
        widths: for each padded target length: the number of pairs, and of their target tokens with end tokens.
    """

    shards: list[int]
    widths: dict[str, list[int]]

    @classmethod
    def of_shard(cls, lengths: Lengths) -> LanguageSummary:
        """Returns the summary of one shard of pairs with these lengths."""
        targets = lengths[:, 1].astype(np.int64) + 1
        widths = width_of(targets)
        chosen = {str(width): targets[widths == width] for width in np.unique(widths)}
        return cls([len(lengths)], {width: [len(of), int(of.sum())] for width, of in chosen.items()})

    @classmethod
    def of_shards(cls, shards: Iterable[LanguageSummary]) -> LanguageSummary:
        """Returns the summary of several shards together."""
        sizes, widths = [], dict[str, list[int]]()
        for shard in shards:
            sizes += shard.shards
            for width, counts in shard.widths.items():
                widths[width] = [sum(both) for both in zip(widths.get(width, (0, 0)), counts, strict=True)]
        return cls(sizes, {width: widths[width] for width in sorted(widths, key=int)})

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
        drawn: by split, the number of pairs of training files that are held out; earlier releases wrote none.
    """

    JSON = StoreDescription

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        description = read_json(folder / "store.json", StoreDescription)
        self.block, self.languages = description["block"], description["languages"]
        self.drawn: dict[str, int] = description["made_of"].get("drawn", {})
        self.source_vocabulary, self.target_vocabulary = read_both(folder)
        self._shards = [(code, n) for code, of in self.languages.items() for n in range(len(of.shards))]
        self._first_shard = np.cumsum([0, *(len(of.shards) for of in self.languages.values())]).tolist()

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the number of training pairs of each language."""
        return {code: of.pairs for code, of in self.languages.items()}

    def fingerprint(self) -> str:
        """Returns a digest of the vocabularies and of each language's numbers of pairs and tokens of each length.

        The shards themselves are not read, because they may be of any size; a change that keeps all these numbers is
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

    def locate(self, languages: Numbers, indices: Numbers) -> Rows:
        """Returns where pair `indices[i]` of language number `languages[i]` lies, for every i. Reads lengths only."""
        rows = np.empty(len(indices), ROW)
        for number, of in enumerate(self.languages.values()):
            mine = np.flatnonzero(languages == number)
            ends = np.cumsum(of.shards)
            shards = np.searchsorted(ends, indices[mine], side="right")
            for shard in np.unique(shards).tolist():
                places = mine[shards == shard]
                within = indices[places] - (int(ends[shard]) - of.shards[shard])
                self._locate_in_shard(self._first_shard[number] + shard, places, within, rows)
        return rows

    def _locate_in_shard(self, shard: int, places: Numbers, within: Numbers, rows: Rows) -> None:
        lengths, starts = self._map(shard, "lengths"), self._map(shard, "starts")
        rows["shard"][places] = shard
        for block in np.unique(within // self.block).tolist():
            first = block * self.block
            chosen = places[within // self.block == block]
            in_block = within[within // self.block == block] - first
            of_block = np.asarray(lengths[first : first + self.block]).astype(np.int64)
            pair_lengths = of_block.sum(1)
            if pair_lengths.sum() != starts[block + 1] - starts[block]:
                path = shard_path(self.folder, *self._shards[shard], "lengths")
                raise damaged(path, "they are not those of its tokens")
            begins = int(starts[block]) + np.cumsum(pair_lengths) - pair_lengths
            rows["offset"][chosen] = begins[in_block]
            rows["source"][chosen], rows["target"][chosen] = of_block[in_block].T

    def gather(self, rows: Rows) -> tuple[Ragged, Ragged]:
        """Returns the ids of the pairs' sources and targets."""
        sources = self._gather(rows["shard"], rows["offset"], rows["source"])
        return sources, self._gather(rows["shard"], rows["offset"] + rows["source"], rows["target"])

    def _gather(self, shards: npt.NDArray[np.int32], offsets: Numbers, lengths: Numbers) -> Ragged:
        ids = np.empty(int(lengths.sum()), np.int64)
        begins = np.cumsum(lengths) - lengths
        for shard in np.unique(shards).tolist():
            mine = shards == shard
            places = places_of(offsets[mine], lengths[mine])
            ids[places_of(begins[mine], lengths[mine])] = self._map(shard, "tokens")[places]
        return ids, lengths

    def _map(self, shard: int, kind: str) -> npt.NDArray[Any]:
        code, number = self._shards[shard]
        pairs = self.languages[code].shards[number]
        shapes = {"lengths": (pairs, 2), "starts": (math.ceil(pairs / self.block) + 1,)}
        shape = shapes.get(kind) or (int(self._map(shard, "starts")[-1]),)
        return mapped_array(shard_path(self.folder, code, number, kind), shape)

    def held_out(self, split: str) -> Iterator[HeldOutPair]:
        """Yields all held-out sentences of "dev" or "test", language after language."""
        return json_rows(self.folder / f"{split}.jsonl", HeldOutPair)


def shard_path(folder: Path, code: str, number: int, kind: str) -> Path:
    """Returns the file of "tokens", "lengths" or "starts"."""
    return folder / "train" / f"{code}-{number:05}.{kind}.npy"


def interleave(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], wide: bool
) -> tuple[Tokens, Lengths]:
    """Returns (tokens, lengths) as a shard holds them; `wide`: ids above 65,535 need four bytes."""
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


def write_shard(folder: Path, code: str, number: int, tokens: Tokens, lengths: Lengths, block: int) -> None:
    """Writes one shard of a language, its pairs in the order given."""
    (folder / "train").mkdir(exist_ok=True)
    ends = pair_ends(lengths)
    starts = np.append(ends[:-1:block], ends[-1]) if len(lengths) else ends
    for kind, array in (("tokens", tokens), ("lengths", lengths), ("starts", starts)):
        save_array(shard_path(folder, code, number, kind), array)


def write_description(
    folder: Path, languages: Mapping[str, LanguageSummary], block: int, made_of: Mapping[str, object]
) -> None:
    """Writes store.json, which makes the folder a store."""
    summaries = {code: asdict(summary) for code, summary in languages.items()}
    description = {"format": FORMAT, "block": block, "languages": summaries, "made_of": made_of}
    write_whole(folder / "store.json", json.dumps(description, indent=1, ensure_ascii=False))
