"""What the processes that prepare parallel text do: count lines and take samples, text to ids, pieces to shards.

Each function reads files and writes files, and a file stands there whole or not at all; so a preparation that was
killed goes on where it was, and the bytes are the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..source import permutation
from ..store import Sizes, Tokens, interleave, save_whole, target_widths, write_shard
from ..vocabulary import Vocabulary
from .defects import EXAMPLES, Defect
from .folders import PairFiles
from .text_files import Piece, count_lines, decoded, read_pieces

LONGEST_PIECE = 16  # characters of a SentencePiece piece: what is longer than so many a token is too long for certain
AT_ONCE = 65_536  # pairs that a shard is shuffled by: more would cost memory for indices


@dataclass(frozen=True)
class Scan:
    """One look through a pair of files.

    Attributes:
        lines: of each file; of a TSV file, one number.
        stride: every so manieth pair is in the sample, the first one included.
    """

    lines: list[int]
    stride: int

    @property
    def pairs(self) -> int:
        return min(self.lines)


@dataclass(frozen=True)
class ScanJob:
    """A pair of files to look through.

    Attributes:
        wanted: pairs of the sample; up to twice as many are kept.
        piece: lines read at once.
        out: the sample's file, beside which the scan is written.
    """

    files: PairFiles
    wanted: int
    piece: int
    out: Path


def scan(job: ScanJob) -> Scan:
    """Counts the lines and keeps an even sample of the pairs that can be read."""
    said = job.out.with_suffix(".json")
    if not said.exists():
        kept: list[tuple[int, str, str]] = []
        stride, total = 1, 0
        for piece in read_pieces(job.files, job.piece):
            for place in range(-total % stride, len(piece.sources), stride):
                pair = _texts(piece, place)
                if isinstance(pair, tuple) and all(pair):
                    kept.append((total + place, *pair))
            total += len(piece.sources)
            while len(kept) > max(1, 2 * job.wanted):
                stride *= 2
                kept = [entry for entry in kept if entry[0] % stride == 0]
        lines = [total] if job.files.target is None else [count_lines(path) for path in job.files.files]
        write_whole(job.out, "".join(json.dumps([s, t], ensure_ascii=False) + "\n" for _, s, t in kept))
        write_whole(said, json.dumps(asdict(Scan(lines, stride))))
    return Scan(**json.loads(said.read_text()))


def _texts(piece: Piece, place: int) -> tuple[str, str] | str:
    """The two sides, stripped; or the kind of defect that keeps them from being read."""
    if piece.targets is not None:
        sides = decoded(piece.sources[place]), decoded(piece.targets[place])
        return "undecodable" if sides[0] is None or sides[1] is None else (sides[0], sides[1])
    line = piece.sources[place].rstrip(b"\r\n").split(b"\t")
    if len(line) != 2:
        return "malformed" if decoded(piece.sources[place]) is not None else "undecodable"
    sides = decoded(line[0]), decoded(line[1])
    return "undecodable" if sides[0] is None or sides[1] is None else (sides[0], sides[1])


@dataclass(frozen=True)
class EncodeJob:
    """One piece of text to encode.

    Attributes:
        shards: how many files the language's pairs are dealt out to.
        out: the piece's files, less their endings.
    """

    files: PairFiles
    piece: Piece
    source_model: Path
    target_model: Path
    max_length: int
    shards: int
    seed: int
    out: Path


@dataclass(frozen=True)
class Encoded:
    """What became of a piece.

    Attributes:
        bounds: of each shard, where its pairs begin in the piece; and the end.
        counts: defects of each kind. defects: the first ones.
    """

    bounds: list[int]
    counts: dict[str, int]
    defects: list[dict[str, Any]]


def encode(job: EncodeJob) -> Encoded:
    """Text to ids, the pairs dealt out to shards by a hash of language, seed and line; defects dropped and told."""
    said = job.out.with_suffix(".json")
    if not said.exists():
        usable, defects, counts = readable(job.files, job.piece, job.max_length)
        places, sources, targets = _ids(job, usable, defects, counts)
        words = random_words(len(job.piece.sources), job.seed, "shard of", job.files.language, job.piece.number)
        shard_of = words[places] % np.uint64(job.shards)
        order = np.argsort(shard_of, kind="stable").tolist()
        wide = is_wide(job.source_model, job.target_model)
        tokens, lengths = interleave([sources[i] for i in order], [targets[i] for i in order], wide)
        save_whole(job.out.with_suffix(".tokens.npy"), tokens)
        save_whole(job.out.with_suffix(".lengths.npy"), lengths)
        bounds = np.searchsorted(shard_of[order], np.arange(job.shards + 1, dtype=np.uint64)).tolist()
        in_order = sorted(defects, key=lambda defect: defect.line)
        write_whole(said, json.dumps(asdict(Encoded(bounds, dict(counts), [vars(defect) for defect in in_order]))))
    return Encoded(**json.loads(said.read_text(encoding="utf-8")))


def _ids(
    job: EncodeJob, usable: list[tuple[int, str, str]], defects: list[Defect], counts: Counter[str]
) -> tuple[npt.NDArray[np.int64], list[list[int]], list[list[int]]]:
    """(place in the piece, source ids, target ids) of the pairs that are short enough."""
    sources = _vocabulary(str(job.source_model)).encode([source for _, source, _ in usable], threads=1)
    targets = _vocabulary(str(job.target_model)).encode([target for _, _, target in usable], threads=1)
    kept = []
    for number, (place, *_) in enumerate(usable):
        lengths = len(sources[number]), len(targets[number])
        if max(lengths) < job.max_length:
            kept.append(number)
        else:
            side = int(lengths[1] > lengths[0])
            how_long = f"{lengths[side] + 1:,} tokens"
            _enter(_too_long(job.files, job.piece, place, side, how_long, job.max_length), defects, counts)
    places = np.array([usable[number][0] for number in kept], np.int64)
    return places, [sources[number] for number in kept], [targets[number] for number in kept]


def readable(
    files: PairFiles, piece: Piece, max_length: int
) -> tuple[list[tuple[int, str, str]], list[Defect], Counter[str]]:
    """(place in the piece, source, target) of the pairs that can be used, the first defects, and how many of each."""
    usable: list[tuple[int, str, str]] = []
    defects: list[Defect] = []
    counts = Counter[str]()
    for place in range(len(piece.sources)):
        pair = _texts(piece, place)
        if isinstance(pair, str):
            side = int(piece.targets is not None and decoded(piece.sources[place]) is not None)
            _enter(_defect(files, piece, place, pair, side, FOUND[pair]), defects, counts)
        elif not all(pair):
            _enter(_defect(files, piece, place, "empty", pair.index(""), FOUND["empty"]), defects, counts)
        elif max(map(len, pair)) > max_length * LONGEST_PIECE:
            side = int(len(pair[1]) > len(pair[0]))
            _enter(_too_long(files, piece, place, side, f"{len(pair[side]):,} characters", max_length), defects, counts)
        else:
            usable.append((place, *pair))
    return usable, defects, counts


FOUND = {"undecodable": "is not UTF-8", "malformed": "has not exactly one tab", "empty": "is empty"}


def _defect(files: PairFiles, piece: Piece, place: int, kind: str, side: int, found: str) -> Defect:
    file = files.files[min(side, len(files.files) - 1)]
    of_side = f"{('source', 'target')[side]} {found}" if kind == "empty" else found
    return Defect(kind, files.language, str(file), piece.first + place, of_side)


def _too_long(files: PairFiles, piece: Piece, place: int, side: int, how_long: str, max_length: int) -> Defect:
    found = f"is too long: {how_long}, data.max_length={max_length} tokens"
    return _defect(files, piece, place, "too_long", side, found)


def _enter(defect: Defect, defects: list[Defect], counts: Counter[str]) -> None:
    counts[defect.kind] += 1
    if counts[defect.kind] <= EXAMPLES:
        defects.append(defect)


def random_words(count: int, *key: object) -> npt.NDArray[np.uint64]:
    """`count` random words, a pure function of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.asarray(np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count), np.uint64)


@lru_cache(maxsize=4)
def _vocabulary(model: str) -> Vocabulary:
    return Vocabulary(Path(model).read_bytes())


def is_wide(*models: Path) -> bool:
    """Whether ids need four bytes."""
    return max(len(_vocabulary(str(model))) for model in models) > 65_536


@dataclass(frozen=True)
class MergeJob:
    """One shard of a language: `pieces` are the encoded pieces' files, less their endings, in order."""

    language: str
    shard: int
    pieces: list[Path]
    seed: int
    folder: Path
    sizes: Sizes


@dataclass(frozen=True)
class Merged:
    """A finished shard: its pairs, and `Trained.widths` of it."""

    pairs: int
    widths: dict[str, tuple[int, int]]


def merge(job: MergeJob) -> Merged:
    """A shard's pairs from all pieces, shuffled."""
    said = job.folder / "work" / "merged" / f"{job.language}-{job.shard:05}.json"
    if not said.exists():
        tokens, lengths = _collected(job)
        ends = np.cumsum(lengths.sum(1, dtype=np.int64))
        order = permutation(len(lengths), job.seed, "shard", job.language, job.shard)
        shuffled = np.empty_like(tokens)
        filled = 0
        for first in range(0, len(order), AT_ONCE):
            chosen = order[first : first + AT_ONCE]
            of_chosen = lengths[chosen].sum(1, dtype=np.int64)
            starts = np.repeat(ends[chosen] - of_chosen - (np.cumsum(of_chosen) - of_chosen), of_chosen)
            count = int(of_chosen.sum())
            shuffled[filled : filled + count] = tokens[starts + np.arange(count)]
            filled += count
        write_shard(job.folder, job.language, job.shard, shuffled, lengths[order], job.sizes.block)
        widths = {str(width): of for width, of in target_widths(lengths).items()}
        write_whole(said, json.dumps(asdict(Merged(len(lengths), widths))))
    return Merged(**json.loads(said.read_text()))


def _collected(job: MergeJob) -> tuple[Tokens, npt.NDArray[np.uint16]]:
    all_tokens, all_lengths = [], []
    for piece in job.pieces:
        bounds = json.loads(piece.with_suffix(".json").read_text(encoding="utf-8"))["bounds"]
        lengths = np.load(piece.with_suffix(".lengths.npy"))
        ends = np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))])
        first, last = bounds[job.shard], bounds[job.shard + 1]
        all_lengths.append(lengths[first:last])
        all_tokens.append(np.load(piece.with_suffix(".tokens.npy"), mmap_mode="r")[ends[first] : ends[last]])
    return np.concatenate(all_tokens), np.concatenate(all_lengths)


def write_whole(path: Path, text: str) -> None:
    """A file of text, there whole or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
