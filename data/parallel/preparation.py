"""Makes a store of a folder of parallel text, with several processes.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end. The bytes do not depend on the
number of processes.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from ...errors import ConfigurationError
from ..cache import append
from ..defects import KEPT, KINDS, BadLine, Defects
from ..lines import decoded, language_in, reading, texts_in
from ..prepared import RunAll, in_processes
from ..sampling import EvenSample, temperature_shares
from ..source import Report, permutation, random_words
from ..store import BLOCK, HeldOutPair, Pairs, StoreWriter, interleave, shuffled, token_kind
from ..vocabulary import SIDES, AnyVocabulary, Normalization, read_both, train_vocabulary
from .folders import PairFiles

VOCABULARY_PAIRS = 1_000_000  # sentence pairs that vocabularies are trained on: more cost time and memory
VOCABULARY_TEMPERATURE = 5.0  # of their sampling
LONGEST_SAMPLE = 4_192  # characters; SentencePiece leaves out sentences of more bytes
LONGEST_PIECE = 16  # characters of a SentencePiece piece; with more than this per token a line is certainly too long

Lines = dict[PairFiles, int]
"""Pairs of lines of each corpus that is trained on, language after language."""

Samples = Mapping[PairFiles, Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class ParallelText:
    """Holds all that decides the bytes of a store, besides the text.

    Attributes:
        root: the folder; None: all files are named.
        languages: None: all that are found.
        target: the language of the translations.
        pieces: numbers of pieces of the vocabularies of source and target.
        shared: one vocabulary for both sides.
        character_coverage, smaller, normalization: see `train_vocabulary`.
        given: paths of vocabularies made elsewhere, of source and target; None: to be trained.
        max_length: tokens of a side with its end token; longer pairs are dropped.
        seed: decides the shuffling.
        language_column: name of the language in records of several.
        held_out: share of a language's training pairs that are held out if it has no dev files; half for each split.
        lacking: language -> the splits for which it has no files.
        piece: lines that one process takes at a time.
        block: see `store.BLOCK`.
        shard: pairs that are shuffled together, a multiple of `block`; about 50 tokens per pair make 100 MB.
    """

    root: str | None
    languages: tuple[str, ...] | None
    target: str
    pieces: tuple[int, int]
    shared: bool
    character_coverage: float
    smaller: bool
    normalization: Normalization
    given: tuple[str | None, str | None]
    max_length: int
    seed: int
    language_column: str | None = None
    held_out: float = 0.0
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    piece: int = 50_000
    block: int = BLOCK
    shard: int = 16 * BLOCK

    def split_of(self, language: str, target: str) -> str:
        """Returns the split to which a training pair goes, by a hash of its target; the same in all languages."""
        if language not in self.lacking:
            return "train"
        digest = hashlib.blake2b(target.encode(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        place = int.from_bytes(digest, "little") / 2**64
        split = "dev" if place < self.held_out / 2 else "test" if place < self.held_out else "train"
        return split if split in self.lacking[language] else "train"


@dataclass
class Preparation:
    """Makes one store.

    Attributes:
        folder: becomes the store.
        pairs: the files to read.
    """

    text: ParallelText
    folder: Path
    pairs: Sequence[PairFiles]
    report: Report
    _defects: Defects = field(default_factory=Defects)
    _held_out: list[HeldOutPair] = field(default_factory=list)
    _encoded: int = 0  # pairs of lines

    def run(self, workers: int) -> None:
        """Does all steps, in so many processes.

        Raises:
            ConfigurationError: a text cannot be used, or a vocabulary size does not fit it.
        """
        with in_processes(workers) as run_all:
            lines, samples = self._scan(run_all)
            train_vocabularies(self.text, self.folder, lines, samples, self.report)
            digests = self._read_held_out()
            writer = StoreWriter(self.folder)
            for code in dict.fromkeys(pair.language for pair in lines):
                self._encode(run_all, writer, code, lines, frozenset(digests.get(code, ())))
        evaluated = {pair.language for pair in self._held_out if pair.split == "dev"}
        files = {pair.language for pair in self.pairs if pair.split == "dev"}
        for code in sorted(writer.languages.keys() - evaluated - files):
            found = f"language '{code}' {KINDS['no_dev']}: trained on, not evaluated: raise data.held_out"
            self._defects.add("no_dev", self.text.root or "data.train", found)
        writer.finish(self._held_out, self._defects, self.text.block, sum(lines.values()))
        self.report("parallel text: languages", len(writer.languages), len(writer.languages))

    def _scan(self, run_all: RunAll) -> tuple[Lines, Samples]:
        """Returns the number of line pairs of each corpus to train on, and a sample of its pairs.

        Raises:
            ConfigurationError: a file is empty, or two that are read line by line have not equally many.
        """
        lines, samples = Lines(), dict[PairFiles, list[tuple[str, str]]]()
        self.report("parallel text: counting lines", 0, len(self.pairs))
        for done, (pair, (counts, sample)) in enumerate(zip(self.pairs, run_all(scan, self._scan_jobs()), strict=True)):
            self.report("parallel text: counting lines", done, len(self.pairs))
            if not all(counts):
                what = f"has no line of '{pair.language}'" if pair.language_column else "is empty"
                raise ConfigurationError(f"{pair.files[counts.index(0)]} {what}: put its text there, or remove it")
            if len(set(counts)) > 1:
                both = f"{pair.source} has {counts[0]:,} lines, {pair.target} has {counts[1]:,}"
                raise ConfigurationError(f"{both}: they are read line by line, so mend or remove both")
            if pair.split == "train":
                lines[pair], samples[pair] = counts[0], sample
        return lines, samples

    def _scan_jobs(self) -> Iterator[tuple[PairFiles, int, int]]:
        """Yields the arguments of `scan` for each corpus.

        The sample has twice as many pairs as the vocabulary will use, because the share is estimated by file size.
        """
        shares = shares_of({pair: pair.source.stat().st_size + 1 for pair in self.pairs if pair.split == "train"})
        for pair in self.pairs:
            wanted = min(int(2 * shares[pair] * VOCABULARY_PAIRS) + 1, VOCABULARY_PAIRS) if pair in shares else 0
            yield pair, wanted, self.text.piece

    def _read_held_out(self) -> dict[str, list[int]]:
        """Reads the pairs of dev and test files; returns their digests by language."""
        digests: dict[str, list[int]] = {}
        for pair in (pair for pair in self.pairs if pair.split != "train"):
            for piece in read_pieces(pair, self.text.piece):
                usable = readable(piece, self.text.max_length, self._defects)
                for line, *_ in short_enough(self.text, self.folder, piece, usable, self._defects):
                    self._held_out.append(held_out_pair(pair.split, piece, line))
                    digests.setdefault(pair.language, []).append(pair_digest(line.source, line.target))
        return digests

    def _encode(self, run_all: RunAll, writer: StoreWriter, code: str, lines: Lines, held_out: Collection[int]) -> None:
        """Encodes a language's pieces, divides their pairs among shards, and writes the shards shuffled.

        Args:
            held_out: digests of the pairs in dev and test files.
        """
        corpora = [pair for pair in lines if pair.language == code]
        shards = max(1, -(-sum(lines[pair] for pair in corpora) // self.text.shard))
        found, total = Defects(), sum(lines.values())
        pieces = enumerate(chain.from_iterable(read_pieces(pair, self.text.piece) for pair in corpora))
        jobs = ((self.text, self.folder, piece, number, held_out, shards) for number, piece in pieces)
        with TemporaryDirectory(dir=self.folder) as work:
            files = [(Path(work, f"{shard}.tokens"), Path(work, f"{shard}.lengths")) for shard in range(shards)]
            for encoded in run_all(encode, jobs):
                for paths, arrays in zip(files, encoded.shards, strict=True):
                    for path, numbers in zip(paths, arrays, strict=True):
                        append(path, numbers)
                self._held_out += encoded.held_out
                found.update(encoded.defects)
                self._encoded += encoded.lines
                self.report("parallel text: token ids", self._encoded, total)
            kind = token_kind(*vocabularies_in(self.folder))
            for shard, (tokens, lengths) in enumerate(files):
                pairs = np.fromfile(tokens, kind), np.fromfile(lengths, np.uint16).reshape(-1, 2)
                order = permutation(len(pairs[1]), self.text.seed, "shard", code, shard)
                writer.add(code, *shuffled(*pairs, order))
                self.report("parallel text: shards", shard + 1, 0)
        self._defects.update(found)
        if not writer.languages[code].pairs:
            named = " and ".join(str(file) for pair in corpora for file in pair.files)
            raise ConfigurationError(f"{named}: no pair of language '{code}' is left: {found.in_words()}")


def shares_of(sizes: Mapping[PairFiles, int]) -> dict[PairFiles, float]:
    """Returns each corpus' share of the pairs that vocabularies are trained on.

    Languages get shares by temperature. A language's share is divided among its corpora by size.
    """
    totals = Counter[str]()
    for pair, size in sizes.items():
        totals[pair.language] += size
    shares = dict(zip(totals, temperature_shares([*totals.values()], VOCABULARY_TEMPERATURE), strict=True))
    return {pair: shares[pair.language] * (size / totals[pair.language]) for pair, size in sizes.items()}


def train_vocabularies(text: ParallelText, folder: Path, lines: Lines, samples: Samples, report: Report) -> None:
    """Trains the vocabularies on the samples, or copies those that are given, into a folder.

    Raises:
        ConfigurationError: there is no text, or a vocabulary size does not fit it. It names both sides if both fail.
    """
    refused = []
    for number, side in enumerate(SIDES[:1] if text.shared else SIDES):
        given, size = text.given[number], text.pieces[number]
        if given is not None:
            shutil.copyfile(given, folder / f"{side}{'.model' if given.endswith('.model') else '.json'}")
            continue
        columns = (0, 1) if text.shared else (number,)
        sentences = [pair[column] for pair in vocabulary_pairs(lines, samples) for column in columns]
        if not sentences:
            raise ConfigurationError(_no_text(text, next(iter(lines))))
        report(f"parallel text: {side} vocabulary, {size:,} pieces by {len(sentences):,} sentences", 0, 0)
        how = (text.character_coverage, f"{side}_vocabulary", text.smaller, text.normalization)
        try:
            (folder / f"{side}.model").write_bytes(train_vocabulary(sentences, size, *how))
        except ConfigurationError as error:
            refused.append(str(error))
    if refused:
        raise ConfigurationError("\n".join(refused))


def _no_text(text: ParallelText, first: PairFiles) -> str:
    """Returns the error that no pair can be used, with the first defect of the first pair of files."""
    defects = Defects()
    readable(next(read_pieces(first, text.piece)), text.max_length, defects)
    found = next(iter(defects.first.values()), f"the first file is {first.source}")
    where = "data.train" if text.root is None else f"data.root={text.root}"
    return f"{where}: no pair of lines has text on both sides; {found}"


def vocabulary_pairs(lines: Lines, samples: Samples) -> Iterator[tuple[str, str]]:
    """Yields the pairs to train vocabularies on, drawn with temperature; those of small languages may repeat."""
    total = min(VOCABULARY_PAIRS, sum(lines.values()))
    for pair, share in shares_of(lines).items():
        sample = samples[pair]
        wanted = max(1, int(share * total)) if sample else 0
        places = (i * len(sample) // wanted if wanted < len(sample) else i % len(sample) for i in range(wanted))
        yield from (sample[place] for place in places)


# -- lines -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Holds consecutive lines of a pair of files, as bytes.

    Attributes:
        places: the number of each line in its file, from 1.
        rows: the columns of each line: source and target, another number in a malformed line of TSV, one for a record.
    """

    files: PairFiles
    places: Sequence[int]
    rows: Sequence[Sequence[bytes]]

    def where(self, place: int, side: int = 0) -> str:
        """Returns a line's file and number; `side` is 0 for the source, 1 for the target."""
        return f"{self.files.files[-1 if side else 0]}, line {self.places[place]}"


class Line(NamedTuple):
    """Holds a pair of texts; `place` counts from the piece's first line."""

    place: int
    source: str
    target: str


def read_pieces(files: PairFiles, size: int) -> Iterator[Piece]:
    """Yields the lines in pieces of ``size``, up to the end of the shorter file. Only "\\n" ends a line."""
    rows: Iterator[Sequence[bytes]] = zip(*map(_lines, files.files), strict=False)
    if files.target is None and files.columns is None:
        rows = (line.rstrip(b"\r\n").split(b"\t")[:: -1 if files.turned else 1] for (line,) in rows)
    numbered: Iterator[tuple[int, Sequence[bytes]]] = enumerate(rows, 1)
    if (column := files.language_column) is not None:
        numbered = (one for one in numbered if language_in(one[1][0], column) == files.language)
    while piece := list(islice(numbered, size)):
        yield Piece(files, *zip(*piece, strict=True))


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, which may be compressed."""
    with reading(path) as file:
        yield from file


def texts_of(piece: Piece, place: int) -> tuple[str, str]:
    """Returns both sides of a line, without blanks at their ends.

    Raises:
        BadLine: one cannot be read, or is empty.
    """
    texts = [decoded(line, side) for side, line in enumerate(piece.rows[place])]
    if piece.files.columns is not None:
        texts = texts_in(texts[0], piece.files.columns, "data.columns")
    if len(texts) != 2:
        raise BadLine("malformed")
    texts = [text.strip() for text in texts]
    if not all(texts):
        side = texts.index("")
        raise BadLine("empty", f"{SIDES[side]} {KINDS['empty']}", side)
    return texts[0], texts[1]


def readable(piece: Piece, max_length: int, defects: Defects) -> list[Line]:
    """Returns the lines that can be used; counts the defects of the others."""
    usable = []
    for place in range(len(piece.rows)):
        try:
            line = Line(place, *texts_of(piece, place))
        except BadLine as bad:
            defects.add(bad.kind, piece.where(place, bad.side), bad)
            continue
        longest = max(len(line.source), len(line.target))
        if longest > max_length * LONGEST_PIECE:
            _too_long(piece, place, f"{longest:,} characters", max_length, defects)
        else:
            usable.append(line)
    return usable


def _too_long(piece: Piece, place: int, length: str, max_length: int, defects: Defects) -> None:
    """Counts a line as too long; `length` says how long it is."""
    defects.add("too_long", piece.where(place), f"{KINDS['too_long']}: {length}, data.max_length={max_length} tokens")


# -- jobs --------------------------------------------------------------------------------------------------------------


class EncodedPiece(NamedTuple):
    """Holds the pairs of a piece for each shard, and those that are held out."""

    lines: int
    shards: list[Pairs]
    held_out: list[HeldOutPair]
    defects: Defects


def scan(pair: PairFiles, wanted: int, size: int) -> tuple[list[int], list[tuple[str, str]]]:
    """Returns the number of lines of each file, and an even sample of its pairs.

    Args:
        wanted: pairs to sample; up to twice as many are returned, fewer where lines cannot be read.
        size: lines read at a time.

    Raises:
        ConfigurationError: a file is a torn archive.
    """
    sample = EvenSample[tuple[str, str]](wanted)
    for piece in read_pieces(pair, size):
        for place in sample.places(len(piece.rows)):
            try:
                texts = texts_of(piece, place)
            except BadLine:
                continue
            if max(map(len, texts)) <= LONGEST_SAMPLE:
                sample.keep(place, texts)
        sample.go_on(len(piece.rows))
    lines = [sample.total] if pair.target is None else [sum(1 for _ in _lines(path)) for path in pair.files]
    return lines, sample.items


def encode(
    text: ParallelText, folder: Path, piece: Piece, number: int, held_out: frozenset[int], shards: int
) -> EncodedPiece:
    """Returns the ids of a piece's training pairs, divided among shards at random, and its pairs of dev and test.

    The shard depends on the seed and the line's place. Pairs that stand in the dev and test files, too, are left out.

    Args:
        folder: the vocabularies' folder.
        number: place of the piece within its language.
        held_out: digests of the language's pairs in dev and test files, see `pair_digest`.
    """
    defects, language = Defects(), piece.files.language
    for_training, for_held_out = list[Line](), list[Line]()
    for line in readable(piece, text.max_length, defects):
        if text.split_of(language, line.target) != "train":
            for_held_out.append(line)
            continue
        is_held_out = pair_digest(line.source, line.target) in held_out
        if is_held_out or line.source == line.target:
            defects.add("held_out" if is_held_out else KEPT, piece.where(line.place))
        if not is_held_out:
            for_training.append(line)
    pairs = short_enough(text, folder, piece, for_training, defects)
    random_numbers = random_words(len(piece.rows), text.seed, "shard of", language, number)
    divided: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(shards)]
    for line, *ids in pairs:
        divided[int(random_numbers[line.place]) % shards].append((ids[0], ids[1]))
    kind = token_kind(*vocabularies_in(folder))
    kept = [
        held_out_pair(text.split_of(language, line.target), piece, line)
        for line, *_ in short_enough(text, folder, piece, for_held_out, defects)
    ]
    return EncodedPiece(len(piece.rows), [interleave(of_shard, kind) for of_shard in divided], kept, defects)


def held_out_pair(split: str, piece: Piece, line: Line) -> HeldOutPair:
    """Returns a line as a pair of dev or test."""
    return HeldOutPair(split, piece.files.language, piece.places[line.place], line.source, line.target)


def pair_digest(source: str, target: str) -> int:
    """Returns 64 bits that tell one pair of texts from others."""
    return int.from_bytes(hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest(), "little")


def short_enough(
    text: ParallelText, folder: Path, piece: Piece, usable: list[Line], defects: Defects
) -> list[tuple[Line, list[int], list[int]]]:
    """Returns the lines that are short enough, each with its ids; counts the others as defects.

    Args:
        folder: the vocabularies' folder.
        usable: lines of `piece`.
    """
    source, target = vocabularies_in(folder)
    of_source = source.encode([line.source for line in usable], threads=1)
    of_target = target.encode([line.target for line in usable], threads=1)
    found = []
    for line, *ids in zip(usable, of_source, of_target, strict=True):
        longest = max(map(len, ids))
        if longest < text.max_length:
            found.append((line, ids[0], ids[1]))
        else:
            _too_long(piece, line.place, f"{longest + 1:,} tokens", text.max_length, defects)
    return found


@lru_cache(maxsize=2)
def vocabularies_in(folder: Path) -> tuple[AnyVocabulary, AnyVocabulary]:
    """Returns the vocabularies of source and target, which each process reads once."""
    return read_both(folder)
