"""A corpus of sentence pairs on disk, whoever made it: token ids in memory-mapped shards, vocabularies, held-out texts.

    store.json                      languages, their shards, how long their sentences are; written last
    source.model, target.model      SentencePiece; no target.model where both sides share one vocabulary
    dev.jsonl, test.jsonl           [language, item, source, target] a line
    train/<language>-<n>.tokens.npy      uint16 or uint32: source ids, target ids of one pair after the other
    train/<language>-<n>.lengths.npy     uint16 (pairs, 2)
    train/<language>-<n>.starts.npy      int64: where each block of pairs begins in tokens, and where the last one ends

The arrays are numpy's own format: nothing to depend on, mapped in a tenth of a millisecond. Opening a store reads
store.json and the vocabularies, so neither time nor memory grows with the corpus. Lengths stand apart from the ids:
batches are formed without reading a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .source import fingerprint_of
from .token_batches import width_of
from .vocabulary import Vocabulary

FORMAT = 2  # raised when the same parameters would give other bytes
LONGEST = 65_535  # tokens of a sentence: lengths are stored in two bytes

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Ragged = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Token ids of several sequences, one after the other, and the length of each sequence."""


class HeldOutPair(NamedTuple):
    """A held-out sentence; `item` is its number, which languages that translate the same English share."""

    language: str
    item: int
    source: str
    target: str


@dataclass(frozen=True)
class Sizes:
    """How pairs are laid out.

    Attributes:
        block: pairs that are read together, in random order; the largest block's order is held in memory.
        shard: pairs of a file, a multiple of `block`; about 50 tokens a pair make files of 100 MB.
    """

    block: int = 65_536
    shard: int = 16 * 65_536


@dataclass(frozen=True)
class Trained:
    """What store.json says of a language.

    Attributes:
        shards: pairs of each file.
        widths: by padded target length with its mark, the number of pairs and of their target tokens, marks counted.
    """

    shards: list[int]
    widths: dict[int, tuple[int, int]]

    @property
    def pairs(self) -> int:
        return sum(self.shards)


@dataclass(frozen=True)
class Rows:
    """Where pairs lie: arrays with one entry a pair.

    Attributes:
        shard: number of the file, counted over all languages.
        offset: of the first source token in it.
        source, target: tokens of each side, without marks.
    """

    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]

    def take(self, numbers: npt.NDArray[np.int64] | slice) -> Rows:
        return Rows(self.shard[numbers], self.offset[numbers], self.source[numbers], self.target[numbers])

    def __len__(self) -> int:
        return len(self.shard)


class Store:
    """An opened corpus.

    Attributes:
        languages: what store.json says of each, in its order.
        source_vocabulary, target_vocabulary: the same object where the sides share one.
        block: pairs of a block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        said = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.block: int = said["block"]
        self.languages = {
            code: Trained(of["shards"], as_widths(of["widths"])) for code, of in said["languages"].items()
        }
        self.source_vocabulary = Vocabulary((folder / "source.model").read_bytes())
        own = folder / "target.model"
        self.target_vocabulary = Vocabulary(own.read_bytes()) if own.exists() else self.source_vocabulary
        self._shards = [(code, n) for code, of in self.languages.items() for n in range(len(of.shards))]
        self._first_shard = np.cumsum([0, *(len(of.shards) for of in self.languages.values())]).tolist()

    @property
    def sizes(self) -> dict[str, int]:
        """Training pairs of each language."""
        return {code: of.pairs for code, of in self.languages.items()}

    def fingerprint(self) -> str:
        """Of what a run sees: vocabularies, and of each language the numbers of pairs and tokens of each length.

        The shards are not read, which may be of any size: a change that leaves all of these alike is not seen.
        """
        said = json.loads((self.folder / "store.json").read_text(encoding="utf-8"))
        vocabularies = [path.read_bytes() for path in sorted(self.folder.glob("*.model"))]
        return fingerprint_of(json.dumps([said["block"], said["languages"]]).encode(), *vocabularies)

    def blocks(self) -> list[list[int]]:
        """Of each language, the pairs of each of its blocks."""
        return [
            [min(self.block, pairs - first) for pairs in of.shards for first in range(0, pairs, self.block)]
            for of in self.languages.values()
        ]

    def locate(self, languages: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> Rows:
        """Where the pairs stand: pair `indices[i]` of language number `languages[i]`. Reads lengths only."""
        count = len(indices)
        rows = Rows(np.empty(count, np.int32), *(np.empty(count, np.int64) for _ in range(3)))
        for number, of in enumerate(self.languages.values()):
            mine = np.flatnonzero(languages == number)
            ends = np.cumsum(of.shards)
            shards = np.searchsorted(ends, indices[mine], side="right")
            for shard in np.unique(shards).tolist():
                places = mine[shards == shard]
                within = indices[places] - (int(ends[shard]) - of.shards[shard])
                self._locate_in_shard(self._first_shard[number] + shard, places, within, rows)
        return rows

    def _locate_in_shard(
        self, shard: int, places: npt.NDArray[np.int64], within: npt.NDArray[np.int64], rows: Rows
    ) -> None:
        lengths, starts = self._map(shard, "lengths"), self._map(shard, "starts")
        rows.shard[places] = shard
        for block in np.unique(within // self.block).tolist():
            first = block * self.block
            chosen = places[within // self.block == block]
            in_block = within[within // self.block == block] - first
            of_block = np.asarray(lengths[first : first + self.block]).astype(np.int64)
            pair_lengths = of_block.sum(1)
            begins = int(starts[block]) + np.cumsum(pair_lengths) - pair_lengths
            rows.offset[chosen] = begins[in_block]
            rows.source[chosen], rows.target[chosen] = of_block[in_block].T

    def gather(self, rows: Rows, opened: dict[int, Tokens] | None = None) -> tuple[Ragged, Ragged]:
        """The ids of the pairs' sources and targets.

        Args:
            opened: files that stay mapped between calls; a dictionary that the caller keeps and drops.
        """
        opened = {} if opened is None else opened
        return (
            self._gather(rows.shard, rows.offset, rows.source, opened),
            self._gather(rows.shard, rows.offset + rows.source, rows.target, opened),
        )

    def _gather(
        self,
        shard: npt.NDArray[np.int32],
        offset: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        opened: dict[int, Tokens],
    ) -> Ragged:
        ids = np.empty(int(lengths.sum()), np.int64)
        begins = np.cumsum(lengths) - lengths
        for number in np.unique(shard).tolist():
            if number not in opened:
                opened[number] = self._map(number, "tokens")
            mine = np.flatnonzero(shard == number)
            of_mine = lengths[mine]
            within = np.arange(int(of_mine.sum())) - np.repeat(np.cumsum(of_mine) - of_mine, of_mine)
            ids[np.repeat(begins[mine], of_mine) + within] = opened[number][np.repeat(offset[mine], of_mine) + within]
        return ids, lengths

    def _map(self, shard: int, kind: str) -> npt.NDArray[Any]:
        code, number = self._shards[shard]
        array: npt.NDArray[Any] = np.load(shard_path(self.folder, code, number, kind), mmap_mode="r")
        return array

    def held_out(self, split: str) -> Iterator[HeldOutPair]:
        """All held-out sentences of "dev" or "test", language after language."""
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield HeldOutPair(*json.loads(line))


def shard_path(folder: Path, code: str, number: int, kind: str) -> Path:
    """Of "tokens", "lengths" or "starts"."""
    return folder / "train" / f"{code}-{number:05}.{kind}.npy"


def interleave(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], wide: bool
) -> tuple[Tokens, npt.NDArray[np.uint16]]:
    """(tokens, lengths) as a shard holds them; `wide`: ids over 65,535 need four bytes."""
    lengths = np.array([(len(s), len(t)) for s, t in zip(sources, targets, strict=True)], np.uint16).reshape(-1, 2)
    ids = chain.from_iterable(chain.from_iterable(zip(sources, targets, strict=True)))
    return np.fromiter(ids, np.uint32 if wide else np.uint16, int(lengths.sum(dtype=np.int64))), lengths


def write_shard(
    folder: Path, code: str, number: int, tokens: Tokens, lengths: npt.NDArray[np.uint16], block: int
) -> None:
    """One file of a language's pairs, in the order given."""
    (folder / "train").mkdir(exist_ok=True)
    ends = np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))])
    starts = np.append(ends[:-1:block], ends[-1]) if len(lengths) else ends
    for kind, array in (("tokens", tokens), ("lengths", lengths), ("starts", starts)):
        save_whole(shard_path(folder, code, number, kind), array)


def save_whole(path: Path, array: npt.NDArray[np.generic]) -> None:
    """The array's file, there whole or not at all."""
    draft = path.with_name(f".{path.name}")
    with draft.open("wb") as file:
        np.save(file, array)
    draft.replace(path)


def target_widths(lengths: npt.NDArray[np.uint16]) -> dict[int, tuple[int, int]]:
    """`Trained.widths` of pairs with these lengths."""
    targets = lengths[:, 1].astype(np.int64) + 1
    widths = width_of(targets)
    return {
        int(width): (int((widths == width).sum()), int(targets[widths == width].sum())) for width in np.unique(widths)
    }


def as_widths(said: Mapping[str, Sequence[int]]) -> dict[int, tuple[int, int]]:
    """`Trained.widths` as JSON has them."""
    return {int(width): (pairs, tokens) for width, (pairs, tokens) in said.items()}


def add_widths(several: Sequence[dict[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """The widths of several shards together."""
    total: dict[int, tuple[int, int]] = {}
    for part in several:
        for width, (pairs, tokens) in part.items():
            before = total.get(width, (0, 0))
            total[width] = (before[0] + pairs, before[1] + tokens)
    return dict(sorted(total.items()))


def write_description(folder: Path, languages: dict[str, Trained], block: int, made_of: dict[str, object]) -> None:
    """store.json, which makes a folder a store."""
    said = {"format": FORMAT, "block": block, "languages": {code: asdict(of) for code, of in languages.items()}}
    draft = folder / ".store.json"
    draft.write_text(json.dumps({**said, "made_of": made_of}, indent=1, ensure_ascii=False), encoding="utf-8")
    draft.replace(folder / "store.json")
