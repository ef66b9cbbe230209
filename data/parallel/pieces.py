"""Does the work of the processes that prepare parallel text: counts and samples lines, encodes pieces, makes shards.

Each function reads and writes files, and a file is there whole or not at all. So a preparation that was killed
continues where it stopped, and the bytes do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..cache import made_json, whole_file
from ..defects import Defects
from ..packed import check_encoding
from ..sampling import EvenSample
from ..source import permutation, random_words
from ..store import (
    LanguageSummary,
    Lengths,
    Numbers,
    Sizes,
    Tokens,
    interleave,
    pair_ends,
    write_shard,
)
from ..vocabulary import Vocabulary
from .folders import PairFiles
from .text_files import Line, Piece, count_lines, defect_at, read_pieces, readable, texts_of, too_long

LONGEST_SAMPLE = 4_192  # characters; SentencePiece leaves out sentences of more bytes
AT_ONCE = 65_536  # pairs that are shuffled at once: more would need more memory for indices


@dataclass(frozen=True)
class Scan:
    """Holds what was found in a pair of files.

    Attributes:
        lines: of each file; of a TSV file, one number.
    """

    lines: list[int]

    @property
    def pairs(self) -> int:
        return min(self.lines)


@dataclass(frozen=True)
class ScanJob:
    """Describes a pair of files to count and sample.

    Attributes:
        wanted: pairs of the sample; up to twice as many are kept.
        piece: lines read at once.
        out: file of the scan and the sample.
    """

    files: PairFiles
    wanted: int
    piece: int
    out: Path


def scan(job: ScanJob) -> Scan:
    """Counts the lines and keeps an even sample of the pairs that can be read.

    Raises:
        ConfigurationError: a file is empty, of another encoding, or a torn archive.
    """
    return Scan(made_json(job.out, lambda: _scan(job))["lines"])


def _scan(job: ScanJob) -> dict[str, Any]:
    for path in job.files.files:
        check_encoding(path)
    sample = EvenSample[tuple[str, str]](job.wanted)
    for piece in read_pieces(job.files, job.piece):
        for place in sample.places(len(piece.sources)):
            pair = texts_of(piece, place)
            if isinstance(pair, tuple) and all(pair) and max(map(len, pair)) <= LONGEST_SAMPLE:
                sample.keep(place, pair)
        sample.go_on(len(piece.sources))
    lines = [sample.total] if job.files.target is None else [count_lines(path) for path in job.files.files]
    return {"lines": lines, "sample": sample.items}


@dataclass(frozen=True)
class EncodeJob:
    """Describes one piece of text to encode.

    Attributes:
        models: the files of the source's and the target's vocabulary.
        shards: number of files among which the language's pairs are divided.
        held_out: file of the digests of the language's held-out pairs.
        kept: kinds of `defects.KEEPABLE` that are trained on.
        out: the piece's files, without their endings.
    """

    piece: Piece
    models: tuple[Path, Path]
    max_length: int
    shards: int
    seed: int
    held_out: Path
    kept: tuple[str, ...]
    out: Path


def encode(job: EncodeJob) -> Defects:
    """Writes a piece's ids, its pairs divided among shards by a hash of the line; returns the defects."""
    return Defects.from_json(made_json(job.out.with_suffix(".json"), lambda: _encode(job)))


def _encode(job: EncodeJob) -> dict[str, Any]:
    usable, defects = readable(job.piece, job.max_length)
    lines, sources, targets = _ids(job, _wanted(job, usable, defects), defects)
    words = random_words(len(job.piece.sources), job.seed, "shard of", job.piece.files.language, job.piece.number)
    shard_of = words[np.array([line.place for line in lines], np.int64)] % np.uint64(job.shards)
    order = np.argsort(shard_of, kind="stable").tolist()
    wide = max(len(_vocabulary(model)) for model in job.models) > 65_536
    tokens, lengths = interleave([sources[i] for i in order], [targets[i] for i in order], wide)
    for kind, array in (("tokens", tokens), ("lengths", lengths)):
        with whole_file(job.out.with_suffix(f".{kind}.npy")) as draft:
            np.save(draft, array)
    bounds = np.searchsorted(shard_of[order], np.arange(job.shards + 1, dtype=np.uint64)).tolist()
    defects.examples.sort(key=lambda defect: defect.line)
    return {"bounds": bounds, **defects.as_json()}


def _wanted(job: EncodeJob, usable: list[Line], defects: Defects) -> list[Line]:
    """Returns the pairs without those that are held out, too, or copied, unless these are kept; counts both kinds."""
    held_out, wanted = _digests(job.held_out), []
    for line in usable:
        kind = "copied" if line.source == line.target else None
        if pair_digest(line.source, line.target) in held_out:
            kind = "held_out"
        if kind is not None:
            defects.add(defect_at(job.piece, line.place, kind, 0))
        if kind is None or kind in job.kept:
            wanted.append(line)
    return wanted


def pair_digest(source: str, target: str) -> int:
    """Returns 64 bits that tell one pair of texts from others."""
    return int.from_bytes(hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def _digests(path: Path) -> frozenset[int]:
    return frozenset(np.load(path).tolist())


def _ids(job: EncodeJob, usable: list[Line], defects: Defects) -> tuple[list[Line], list[list[int]], list[list[int]]]:
    """Returns the lines that are short enough, with their ids; adds the others to `defects`."""
    sides = [[line.source for line in usable], [line.target for line in usable]]
    sources, targets = (_vocabulary(m).encode(texts, threads=1) for m, texts in zip(job.models, sides, strict=True))
    kept = []
    for number, line in enumerate(usable):
        lengths = len(sources[number]), len(targets[number])
        if max(lengths) < job.max_length:
            kept.append(number)
        else:
            side = int(lengths[1] > lengths[0])
            defects.add(too_long(job.piece, line.place, side, f"{lengths[side] + 1:,} tokens", job.max_length))
    return [usable[n] for n in kept], [sources[n] for n in kept], [targets[n] for n in kept]


@lru_cache(maxsize=4)
def _vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(model.read_bytes())


@dataclass(frozen=True)
class MergeJob:
    """Describes one shard of a language.

    Attributes:
        pieces: the encoded pieces' files, without their endings, in order.
        folder: of the store.
        result: the file that is written when the shard is finished.
    """

    language: str
    shard: int
    pieces: list[Path]
    seed: int
    folder: Path
    sizes: Sizes
    result: Path


def merge(job: MergeJob) -> LanguageSummary:
    """Collects a shard's pairs from all pieces, shuffles and writes them."""
    return LanguageSummary.from_json(made_json(job.result, lambda: asdict(_merge(job))))


def _merge(job: MergeJob) -> LanguageSummary:
    tokens, lengths = _collected(job)
    ends = pair_ends(lengths)[1:]
    order = permutation(len(lengths), job.seed, "shard", job.language, job.shard)
    shuffled = np.empty_like(tokens)
    filled = 0
    for first in range(0, len(order), AT_ONCE):
        chosen = order[first : first + AT_ONCE]
        places = _token_places(ends[chosen], lengths[chosen].sum(1, dtype=np.int64))
        shuffled[filled : filled + len(places)] = tokens[places]
        filled += len(places)
    write_shard(job.folder, job.language, job.shard, shuffled, lengths[order], job.sizes.block)
    return LanguageSummary.of_shard(lengths)


def _token_places(ends: Numbers, lengths: Numbers) -> Numbers:
    """Returns the places of the tokens of pairs that end at `ends`, one pair after the other."""
    starts = np.repeat(ends - lengths - (np.cumsum(lengths) - lengths), lengths)
    return np.asarray(starts + np.arange(len(starts)))


def _collected(job: MergeJob) -> tuple[Tokens, Lengths]:
    all_tokens, all_lengths = [], []
    for piece in job.pieces:
        bounds = json.loads(piece.with_suffix(".json").read_text(encoding="utf-8"))["bounds"]
        lengths = np.load(piece.with_suffix(".lengths.npy"))
        ends = pair_ends(lengths)
        first, last = bounds[job.shard], bounds[job.shard + 1]
        all_lengths.append(lengths[first:last])
        all_tokens.append(np.load(piece.with_suffix(".tokens.npy"), mmap_mode="r")[ends[first] : ends[last]])
    return np.concatenate(all_tokens), np.concatenate(all_lengths)
