"""Does the work of the processes that prepare parallel text: counts and samples lines, encodes pieces, makes shards.

Each function reads and writes files, and a file is there whole or not at all. So a preparation that was killed
continues where it stopped, and the bytes do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache import made_json, whole_file
from ..defects import Defects
from ..packed import checked_start
from ..prepared import WORK
from ..records import check_lines
from ..sampling import EvenSample
from ..source import permutation, random_words
from ..store import LanguageSummary, Numbers, Sizes, interleave, pair_ends, places_of, write_shard
from ..vocabulary import Vocabulary
from .folders import PairFiles
from .text_files import Line, Piece, count_lines, defect_at, read_pieces, readable, texts_of, too_long

LONGEST_SAMPLE = 4_192  # characters; SentencePiece leaves out sentences of more bytes
AT_ONCE = 65_536  # pairs that are shuffled at once: more would need more memory for indices


@dataclass(frozen=True)
class Vocabularies:
    """Describes the vocabularies to train.

    Attributes:
        source, target: pieces.
        shared: one vocabulary for both sides, of `source` pieces.
        character_coverage: see `train_vocabulary`.
        pairs: sentence pairs given to SentencePiece.
        temperature: of the sampling of these pairs.
        smaller: a text that supports fewer pieces gets so many.
    """

    source: int
    target: int
    shared: bool = False
    character_coverage: float = 0.999995
    pairs: int = 1_000_000
    temperature: float = 5.0
    smaller: bool = False


@dataclass(frozen=True)
class ParallelText:
    """Holds all that decides the bytes of a store, besides the text.

    Attributes:
        root: the folder; None: all files are named.
        languages: None: all that are found. target: the language of the translations.
        max_length: tokens of a side with its end token; longer pairs are dropped.
        seed: of the shuffling.
        kept: kinds of `defects.KEEPABLE` that are trained on.
        piece: lines that one process takes at a time.
    """

    root: str | None
    languages: tuple[str, ...] | None
    target: str
    vocabularies: Vocabularies
    max_length: int
    seed: int
    kept: tuple[str, ...] = ("copied",)
    piece: int = 50_000
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def named(self) -> str:
        """Returns the key that says where the text is, for messages."""
        return "data.train" if self.root is None else f"data.root={self.root}"


@dataclass(frozen=True)
class Draft:
    """Names the files of a store that is being made.

    Attributes:
        text: what the store is made of.
        folder: that becomes the store.
    """

    text: ParallelText
    folder: Path

    @property
    def models(self) -> tuple[Path, Path]:
        """Returns the files of the source's and the target's vocabulary."""
        source = self.folder / "source.model"
        return source, source if self.text.vocabularies.shared else self.folder / "target.model"

    def scan(self, pair: PairFiles) -> Path:
        number = f"-{pair.number}" if pair.number else ""
        return self.folder / WORK / "scan" / f"{pair.language}-{pair.split}{number}.json"

    def held_out(self, language: str) -> Path:
        """Returns the file of the digests of a language's held-out pairs."""
        return self.folder / WORK / "held_out" / f"{language}.npy"

    def piece(self, language: str, number: int) -> Path:
        """Returns the file that describes a piece; the files of its ids have other endings."""
        return self.folder / WORK / "ids" / f"{language}-{number:06}.json"

    def result(self, language: str, shard: int | None = None) -> Path:
        """Returns the file that is written when a language, or a shard of it, is finished."""
        name = language if shard is None else f"{language}-{shard:05}"
        return self.folder / WORK / "shards" / f"{name}.json"


def scan(draft: Draft, pair: PairFiles, wanted: int) -> list[int]:
    """Counts the lines of each file; keeps an even sample of `wanted` pairs that can be read, or up to twice as many.

    Raises:
        ConfigurationError: a file is empty, of another encoding, or a torn archive.
    """
    lines: list[int] = made_json(draft.scan(pair), lambda: _scan(pair, wanted, draft.text.piece))["lines"]
    return lines


def _scan(pair: PairFiles, wanted: int, size: int) -> dict[str, Any]:
    for path in pair.files:
        start = checked_start(path)
        if pair.columns is not None:
            check_lines(path, start.decode(errors="replace"))
    sample = EvenSample[tuple[str, str]](wanted)
    for piece in read_pieces(pair, size):
        for place in sample.places(len(piece.rows)):
            texts = texts_of(piece, place)
            if isinstance(texts, tuple) and all(texts) and max(map(len, texts)) <= LONGEST_SAMPLE:
                sample.keep(place, texts)
        sample.go_on(len(piece.rows))
    lines = [sample.total] if pair.target is None else [count_lines(path) for path in pair.files]
    return {"lines": lines, "sample": sample.items}


def encode(draft: Draft, piece: Piece, shards: int) -> dict[str, Any]:
    """Writes a piece's ids, its pairs divided among shards by a hash of the line.

    Returns:
        "bounds": where the pairs of each shard begin and the last ones end, in pairs and in tokens; and the defects.
    """
    usable, defects = readable(piece, draft.text.max_length)
    lines, sources, targets = _ids(draft, piece, _wanted(draft, piece, usable, defects), defects)
    words = random_words(len(piece.rows), draft.text.seed, "shard of", piece.files.language, piece.number)
    shard_of = words[np.array([line.place for line in lines], np.int64)] % np.uint64(shards)
    order = np.argsort(shard_of, kind="stable").tolist()
    tokens, lengths = interleave([sources[i] for i in order], [targets[i] for i in order], _has_wide_ids(draft))
    for kind, array in (("tokens", tokens), ("lengths", lengths)):
        with whole_file(draft.piece(piece.files.language, piece.number).with_suffix(f".{kind}")) as file:
            array.tofile(file)  # without a header, so that a part of it is read by its place alone
    bounds = np.searchsorted(shard_of[order], np.arange(shards + 1, dtype=np.uint64))
    defects.examples.sort(key=lambda defect: defect.line)
    return {"bounds": [bounds.tolist(), pair_ends(lengths)[bounds].tolist()], **defects.as_json()}


def _wanted(draft: Draft, piece: Piece, usable: list[Line], defects: Defects) -> list[Line]:
    """Returns the pairs without those that are held out, too, or copied, unless these are kept; counts both kinds."""
    held_out, wanted = _digests(draft.held_out(piece.files.language)), []
    for line in usable:
        kind = "copied" if line.source == line.target else None
        if pair_digest(line.source, line.target) in held_out:
            kind = "held_out"
        if kind is not None:
            defects.add(defect_at(piece, line.place, kind, 0))
        if kind is None or kind in draft.text.kept:
            wanted.append(line)
    return wanted


def pair_digest(source: str, target: str) -> int:
    """Returns 64 bits that tell one pair of texts from others."""
    return int.from_bytes(hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def _digests(path: Path) -> frozenset[int]:
    return frozenset(np.load(path).tolist())


def _ids(
    draft: Draft, piece: Piece, usable: list[Line], defects: Defects
) -> tuple[list[Line], list[list[int]], list[list[int]]]:
    """Returns the lines that are short enough, with their ids; adds the others to `defects`."""
    sides, most = [[line.source for line in usable], [line.target for line in usable]], draft.text.max_length
    sources, targets = (_vocabulary(m).encode(texts, threads=1) for m, texts in zip(draft.models, sides, strict=True))
    kept = []
    for number, line in enumerate(usable):
        lengths = len(sources[number]), len(targets[number])
        if max(lengths) < most:
            kept.append(number)
        else:
            side = int(lengths[1] > lengths[0])
            defects.add(too_long(piece, line.place, side, f"{lengths[side] + 1:,} tokens", most))
    return [usable[n] for n in kept], [sources[n] for n in kept], [targets[n] for n in kept]


@lru_cache(maxsize=4)
def _vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(model.read_bytes())


def _has_wide_ids(draft: Draft) -> bool:
    """Returns whether an id of these vocabularies takes four bytes."""
    return max(len(_vocabulary(model)) for model in draft.models) > 65_536


def merge(draft: Draft, language: str, shard: int, bounds: Numbers) -> dict[str, Any]:
    """Collects a shard's pairs from all pieces, shuffles and writes them; returns their `LanguageSummary`.

    Args:
        bounds: [pieces, 2, 2] where they begin and end in each piece, in pairs and in tokens.
    """
    pieces = [draft.piece(language, number) for number in range(len(bounds))]
    lengths = _collected(pieces, "lengths", np.uint16, 2 * bounds[:, 0]).reshape(-1, 2)
    tokens = _collected(pieces, "tokens", np.uint32 if _has_wide_ids(draft) else np.uint16, bounds[:, 1])
    starts, of_pairs = pair_ends(lengths), lengths.sum(1, dtype=np.int64)
    order = permutation(len(lengths), draft.text.seed, "shard", language, shard)
    shuffled = np.empty_like(tokens)
    filled = 0
    for first in range(0, len(order), AT_ONCE):
        chosen = order[first : first + AT_ONCE]
        places = places_of(starts[chosen], of_pairs[chosen])
        shuffled[filled : filled + len(places)] = tokens[places]
        filled += len(places)
    write_shard(draft.folder, language, shard, shuffled, lengths[order], draft.text.sizes.block)
    return asdict(LanguageSummary.of_shard(lengths))


def _collected(pieces: list[Path], kind: str, number: type[np.integer[Any]], bounds: Numbers) -> npt.NDArray[Any]:
    """Returns a part of each piece's numbers, one after the other. Nothing else of the pieces is read or kept open."""
    ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    collected = np.empty(ends[-1], number)
    for piece, (first, last), end in zip(pieces, bounds.tolist(), ends.tolist(), strict=True):
        part = np.fromfile(piece.with_suffix(f".{kind}"), number, last - first, offset=first * collected.itemsize)
        collected[end - len(part) : end] = part
    return collected
