"""Does the work of the processes that prepare parallel text: counts and samples lines, encodes pieces, makes shards.

The bytes that they write do not depend on the number of processes.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..cache import open_array, save_array
from ..defects import KEPT, KINDS, Defect, Defects
from ..lines import BYTE_ORDER_MARK, decoded, language_in, reading, texts_in
from ..prepared import WORK
from ..sampling import EvenSample
from ..source import permutation, random_words
from ..store import Numbers, Sizes, interleave, pair_ends, places_of
from ..vocabulary import SIDES, AnyVocabulary, Normalization, read_vocabulary
from .folders import PairFiles

LONGEST_SAMPLE = 4_192  # characters; SentencePiece leaves out sentences of more bytes
LONGEST_PIECE = 16  # characters of a SentencePiece piece; with more than this per token a line is certainly too long
AT_ONCE = 65_536  # pairs that are shuffled at once: more would need more memory for indices


@dataclass(frozen=True)
class Vocabularies:
    """Describes the vocabularies to train.

    Attributes:
        source, target: pieces.
        shared: one vocabulary for both sides, of `source` pieces.
        character_coverage, normalization: see `train_vocabulary`.
        smaller: a text that supports fewer pieces gets so many.
        given: paths of vocabularies made elsewhere, of source and target; None: to be trained.
    """

    source: int
    target: int
    shared: bool = False
    character_coverage: float = 0.999995
    smaller: bool = False
    normalization: Normalization = "nmt_nfkc"
    given: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class ParallelText:
    """Holds all that decides the bytes of a store, besides the text.

    Attributes:
        root: the folder; None: all files are named.
        languages: None: all that are found. target: the language of the translations.
        max_length: tokens of a side with its end token; longer pairs are dropped.
        seed: decides the shuffling.
        language_column: name of the language in records of several.
        held_out: share of a language's pairs that are held out where files of its own are lacking; half for each split.
        lacking: the splits of each language that have no files.
        piece: lines that one process takes at a time.
    """

    root: str | None
    languages: tuple[str, ...] | None
    target: str
    vocabularies: Vocabularies
    max_length: int
    seed: int
    language_column: str | None = None
    held_out: float = 0.0
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    piece: int = 50_000
    sizes: Sizes = field(default_factory=Sizes)

    def split_of(self, language: str, target: str) -> str:
        """Returns the split of a pair of the training files: a function of its target, the same in all languages."""
        if language not in self.lacking:
            return "train"
        digest = hashlib.blake2b(target.encode(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        place = int.from_bytes(digest, "little") / 2**64
        split = "dev" if place < self.held_out / 2 else "test" if place < self.held_out else "train"
        return split if split in self.lacking[language] else "train"

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
        wanted = self.text.vocabularies
        endings = (".model" if path is None or path.endswith(".model") else ".json" for path in wanted.given)
        source, target = (self.folder / f"{side}{ending}" for side, ending in zip(SIDES, endings, strict=True))
        return source, source if wanted.shared else target

    def held_out(self, language: str) -> Path:
        """Returns the intermediate file of the digests of a language's held-out pairs."""
        return self.folder / WORK / f"held_out-{language}.npy"

    def piece(self, language: str, number: int, kind: str) -> Path:
        """Returns the intermediate file of a piece's "tokens" or "lengths", or of a shard's "shuffled_…"."""
        return self.folder / WORK / f"{language}-{number:06}.{kind}.npy"


# -- lines -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Holds consecutive lines of a pair of files, as bytes.

    Attributes:
        number: place of the piece within its language.
        places: the number of each line in its file, from 1.
        rows: the columns of each line; two, unless a line of a TSV file is malformed; a record is one column.
    """

    files: PairFiles
    number: int
    places: Sequence[int]
    rows: Sequence[Sequence[bytes]]


class Line(NamedTuple):
    """Holds a pair of texts; `place` counts from the piece's first line."""

    place: int
    source: str
    target: str


def read_pieces(files: PairFiles, size: int, numbers: Iterator[int] | None = None) -> Iterator[Piece]:
    """Yields the lines in pieces of ``size``, up to the end of the shorter file. Only "\\n" ends a line.

    Args:
        numbers: numbers of the pieces; None: from 0.
    """
    numbers = count() if numbers is None else numbers
    rows: Iterator[Sequence[bytes]] = zip(*map(_lines, files.files), strict=False)
    if files.target is None and files.columns is None:
        rows = (line.rstrip(b"\r\n").split(b"\t")[:: -1 if files.turned else 1] for (line,) in rows)
    numbered: Iterator[tuple[int, Sequence[bytes]]] = enumerate(rows, 1)
    if (column := files.language_column) is not None:
        numbered = (one for one in numbered if language_in(one[1][0], column) in (files.language, *files.unfit))
    while piece := list(islice(numbered, size)):
        yield Piece(files, next(numbers), *zip(*piece, strict=True))


def _lines(path: Path) -> Iterator[bytes]:
    with reading(path) as file:
        yield from file


def texts_of(piece: Piece, place: int) -> tuple[str, str] | Defect:
    """Returns both sides of a line, without blanks at their ends, or the defect that makes it unreadable."""
    texts = list[str]()
    for side, line in enumerate(piece.rows[place]):
        text, wrong = decoded(line.removeprefix(BYTE_ORDER_MARK))
        if wrong:
            return defect_at(piece, place, wrong, side)
        texts.append(text.strip())
    column = piece.files.language_column
    if column is not None and language_in(piece.rows[place][0], column) != piece.files.language:
        said = f"names no source language, as de, under '{column}' (data.language_column)"
        return defect_at(piece, place, "malformed", 0, said)
    if piece.files.columns is not None:
        try:
            texts = [text.strip() for text in texts_in(texts[0], piece.files.columns, "data.columns")]
        except ValueError as error:
            return defect_at(piece, place, "malformed", 0, str(error))
        if any("\0" in text for text in texts):
            return defect_at(piece, place, "nul", 0)
    return (texts[0], texts[1]) if len(texts) == 2 else defect_at(piece, place, "malformed", 0)


def readable(piece: Piece, max_length: int) -> tuple[list[Line], Defects]:
    """Returns the lines that can be used, and the defects found: of the other lines, and byte order marks."""
    usable, defects = [], Defects()
    for place, sides in enumerate(piece.rows):
        texts = texts_of(piece, place)
        if isinstance(texts, Defect):
            defects.add(texts)
            continue
        for side, line in enumerate(sides):
            if line.startswith(BYTE_ORDER_MARK):
                defects.add(defect_at(piece, place, "byte_order_mark", side))
        if not all(texts):
            side = texts.index("")
            defects.add(defect_at(piece, place, "empty", side, f"{('source', 'target')[side]} {KINDS['empty']}"))
        elif max(map(len, texts)) > max_length * LONGEST_PIECE:
            side = int(len(texts[1]) > len(texts[0]))
            defects.add(too_long(piece, place, side, f"{len(texts[side]):,} characters", max_length))
        else:
            usable.append(Line(place, *texts))
    return usable, defects


def defect_at(piece: Piece, place: int, kind: str, side: int, found: str | None = None) -> Defect:
    """Returns the defect of one line; `side` is 0 for the source, 1 for the target."""
    files = piece.files.files
    file = files[min(side, len(files) - 1)]
    return Defect(kind, piece.files.language, str(file), piece.places[place], found or KINDS[kind])


def too_long(piece: Piece, place: int, side: int, length: str, max_length: int) -> Defect:
    """Returns the defect of a line that is too long on one side."""
    found = f"{KINDS['too_long']}: {length}, data.max_length={max_length} tokens"
    return defect_at(piece, place, "too_long", side, found)


# -- jobs --------------------------------------------------------------------------------------------------------------

HeldOut = tuple[str, str, int, str, str]
"""Split, language, line, source and target of a pair."""


class EncodedPiece(NamedTuple):
    """Describes a piece: where each shard's pairs begin, and the last end, in pairs and in tokens; what is held out."""

    bounds: Numbers
    held_out: list[HeldOut]
    defects: Defects


def scan(pair: PairFiles, wanted: int, size: int) -> tuple[list[int], list[tuple[str, str]]]:
    """Returns the lines of each file, and an even sample of `wanted` pairs that can be read, or up to twice as many.

    Args:
        size: lines read at a time.

    Raises:
        ConfigurationError: a file is a torn archive.
    """
    sample = EvenSample[tuple[str, str]](wanted)
    for piece in read_pieces(pair, size):
        for place in sample.places(len(piece.rows)):
            texts = texts_of(piece, place)
            if isinstance(texts, tuple) and all(texts) and max(map(len, texts)) <= LONGEST_SAMPLE:
                sample.keep(place, texts)
        sample.go_on(len(piece.rows))
    lines = [sample.total] if pair.target is None else [sum(1 for _ in _lines(path)) for path in pair.files]
    return lines, sample.items


def encode(draft: Draft, piece: Piece, shards: int) -> EncodedPiece:
    """Writes a piece's ids, its pairs divided among shards by a hash of the line."""
    usable, defects = readable(piece, draft.text.max_length)
    language = piece.files.language
    splits = {line: draft.text.split_of(language, line.target) for line in usable}
    trained = [line for line, split in splits.items() if split == "train"]
    held, _, _ = short_enough(draft, piece, [line for line, split in splits.items() if split != "train"], defects)
    held_out = [(splits[line], language, piece.places[line.place], *line[1:]) for line in held]
    lines, sources, targets = short_enough(draft, piece, _wanted(draft, piece, trained, defects), defects)
    words = random_words(len(piece.rows), draft.text.seed, "shard of", piece.files.language, piece.number)
    shard_of = words[np.array([line.place for line in lines], np.int64)] % np.uint64(shards)
    order = np.argsort(shard_of, kind="stable").tolist()
    tokens, lengths = interleave([sources[i] for i in order], [targets[i] for i in order], is_wide(draft))
    for kind, array in (("tokens", tokens), ("lengths", lengths)):
        save_array(draft.piece(language, piece.number, kind), array)
    bounds = np.searchsorted(shard_of[order], np.arange(shards + 1, dtype=np.uint64))
    defects.examples.sort(key=lambda defect: defect.line)
    return EncodedPiece(np.stack([bounds, pair_ends(lengths)[bounds]]), held_out, defects)


def _wanted(draft: Draft, piece: Piece, usable: list[Line], defects: Defects) -> list[Line]:
    """Returns the pairs without those that are held out, too; counts these, and copied ones."""
    held_out, wanted = _digests(draft.held_out(piece.files.language)), []
    for line in usable:
        kind = KEPT if line.source == line.target else None
        if pair_digest(line.source, line.target) in held_out:
            kind = "held_out"
        if kind is not None:
            defects.add(defect_at(piece, line.place, kind, 0))
        if kind in (None, KEPT):
            wanted.append(line)
    return wanted


def pair_digest(source: str, target: str) -> int:
    """Returns 64 bits that tell one pair of texts from others."""
    return int.from_bytes(hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def _digests(path: Path) -> frozenset[int]:
    return frozenset(open_array(path).tolist())


def short_enough(
    draft: Draft, piece: Piece, usable: list[Line], defects: Defects
) -> tuple[list[Line], list[list[int]], list[list[int]]]:
    """Returns the lines that are short enough, with their ids; adds the others to `defects`."""
    sides, most = [[line.source for line in usable], [line.target for line in usable]], draft.text.max_length
    encoded = [_vocabulary(m).encode(texts, threads=1) for m, texts in zip(draft.models, sides, strict=True)]
    lines, sources, targets = list[Line](), list[list[int]](), list[list[int]]()
    for line, source, target in zip(usable, *encoded, strict=True):
        side = int(len(target) > len(source))
        if (longest := len((source, target)[side])) < most:
            lines.append(line)
            sources.append(source)
            targets.append(target)
        else:
            defects.add(too_long(piece, line.place, side, f"{longest + 1:,} tokens", most))
    return lines, sources, targets


def is_wide(draft: Draft) -> bool:
    """Returns whether there are ids above 65,535."""
    return max(len(_vocabulary(model)) for model in draft.models) > 65_536


@lru_cache(maxsize=4)
def _vocabulary(file: Path) -> AnyVocabulary:
    return read_vocabulary(file, of_pairs=True)


def merge(draft: Draft, language: str, shard: int, bounds: Numbers) -> None:
    """Collects a shard's pairs from all pieces, shuffles them and writes them to intermediate files.

    Args:
        bounds: [pieces, 2, 2] where they begin and end in each piece, in pairs and in tokens.
    """
    kinds = zip(("lengths", "tokens"), (bounds[:, 0], bounds[:, 1]), strict=True)
    lengths, tokens = (_collected(draft, language, kind, of_kind) for kind, of_kind in kinds)
    starts, of_pairs = pair_ends(lengths), lengths.sum(1, dtype=np.int64)
    order = permutation(len(lengths), draft.text.seed, "shard", language, shard)
    shuffled = np.empty_like(tokens)
    filled = 0
    for first in range(0, len(order), AT_ONCE):
        chosen = order[first : first + AT_ONCE]
        places = places_of(starts[chosen], of_pairs[chosen])
        shuffled[filled : filled + len(places)] = tokens[places]
        filled += len(places)
    for kind, array in (("tokens", shuffled), ("lengths", lengths[order])):
        save_array(draft.piece(language, shard, f"shuffled_{kind}"), array)


def _collected(draft: Draft, language: str, kind: str, bounds: Numbers) -> npt.NDArray[Any]:
    """Returns a part of each piece's numbers, one after the other; nothing else of the pieces is read or kept open."""
    files = (open_array(draft.piece(language, number, kind)) for number in range(len(bounds)))
    return np.concatenate([file[first:last].copy() for file, (first, last) in zip(files, bounds.tolist(), strict=True)])
