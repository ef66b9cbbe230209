"""Makes a store of a folder of parallel text, with several processes.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids; each language's pairs are shuffled.
All of this happens in a folder of the cache that becomes the store at the end. The bytes do not depend on the number of
processes.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from ...errors import ConfigurationError
from ..cache import append, open_array
from ..defects import KEPT, KINDS, BadLine, Defects
from ..lines import decoded, reading, texts_in
from ..prepared import RunAll, in_processes
from ..sampling import EvenSample, temperature_shares
from ..source import HeldOutSample, Report, permutation
from ..store import BLOCK, Lengths, StoreWriter, Tokens, interleave, shuffled, token_kind
from ..vocabulary import SIDES, AnyVocabulary, Normalization, read_both, train_vocabulary
from .folders import PairFiles

VOCABULARY_PAIRS = 1_000_000  # sentence pairs that vocabularies are trained on: more cost time and memory
VOCABULARY_TEMPERATURE = 5.0  # of their sampling
LONGEST_SAMPLE = 4_192  # characters; SentencePiece leaves out sentences of more bytes

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
        held_out: share of a language's training pairs that are held out if it has no dev files; half for each split.
        lacking: language -> the splits for which it has no files.
        piece: lines that one process takes at a time.
        block: pairs that are read together, see `store.BLOCK`.
        shard: pairs that are written at once, a multiple of `block`; about 50 tokens per pair make 100 MB.
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
    held_out: float = 0.0
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    piece: int = 50_000
    block: int = BLOCK
    shard: int = 16 * BLOCK

    def split_of(self, files: PairFiles, target: str) -> str:
        """Returns the split of a pair: that of its files, or one that lacks files, by a hash of the target sentence."""
        if files.split != "train" or files.language not in self.lacking:
            return files.split
        digest = hashlib.blake2b(target.encode(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        place = int.from_bytes(digest, "little") / 2**64
        split = "dev" if place < self.held_out / 2 else "test" if place < self.held_out else "train"
        return split if split in self.lacking[files.language] else "train"


def prepare_pairs(text: ParallelText, folder: Path, pairs: Sequence[PairFiles], workers: int, report: Report) -> None:
    """Makes a store of these files in a folder, in so many processes.

    Raises:
        ConfigurationError: a text cannot be used, or a vocabulary size does not fit it.
    """
    writer, held_out, defects, encoded = StoreWriter(folder), list[HeldOutSample](), Defects(), 0
    with in_processes(workers) as run_all:
        lines, samples = scan_all(text, pairs, run_all, report)
        train_vocabularies(text, folder, lines, samples, report)
        for code in dict.fromkeys(pair.language for pair in lines):
            corpora, found = [pair for pair in pairs if pair.language == code], Defects()
            with TemporaryDirectory(dir=folder) as work:
                tokens, lengths = Path(work, "tokens"), Path(work, "lengths")
                for piece in encode_all(text, folder, corpora, run_all):
                    append(tokens, piece.tokens)
                    append(lengths, piece.lengths)
                    held_out += piece.held_out
                    found.update(piece.defects)
                    encoded += piece.lines
                    report("parallel text: token ids", encoded, sum(lines.values()))
                kind = token_kind(*vocabularies_in(folder))
                unshuffled = open_array(tokens, kind), open_array(lengths, np.uint16).reshape(-1, 2)
                order = permutation(len(unshuffled[1]), text.seed, "shard", code, 0)
                for first in range(0, len(order), text.shard):
                    writer.add(code, *shuffled(*unshuffled, order[first : first + text.shard]))
            defects.update(found)
            if code not in writer.languages:
                named = " and ".join(str(file) for pair in corpora if pair.split == "train" for file in pair.files)
                raise ConfigurationError(f"{named}: no pair of language '{code}' is left: {found.in_words()}")
    evaluated = {sample.language for sample in held_out if sample.split == "dev"}
    files = {pair.language for pair in pairs if pair.split == "dev"}
    for code in sorted(writer.languages.keys() - evaluated - files):
        no_dev = f"language '{code}' {KINDS['no_dev']}: trained on, not evaluated: raise data.held_out"
        defects.add("no_dev", text.root or "data.train", no_dev)
    writer.finish(held_out, defects, text.block, sum(lines.values()))
    report("parallel text: languages", len(writer.languages), len(writer.languages))


def scan_all(text: ParallelText, pairs: Sequence[PairFiles], run_all: RunAll, report: Report) -> tuple[Lines, Samples]:
    """Returns the number of line pairs of each corpus to train on, and a sample of its pairs.

    Raises:
        ConfigurationError: a file is empty, two that are read line by line have not equally many, or no line can be
            used.
    """
    lines, samples, unusable = Lines(), dict[PairFiles, list[tuple[str, str]]](), Defects()
    # Twice as many pairs as the vocabulary will use, because the shares are estimated by file size.
    shares = shares_of({pair: pair.source.stat().st_size + 1 for pair in pairs if pair.split == "train"})
    wanted = {pair: min(int(2 * share * VOCABULARY_PAIRS) + 1, VOCABULARY_PAIRS) for pair, share in shares.items()}
    scanned = run_all(scan, ((pair, wanted.get(pair, 0), text.piece) for pair in pairs))
    for done, (pair, (counts, sample, defects)) in enumerate(zip(pairs, scanned, strict=True)):
        report("parallel text: counting lines", done, len(pairs))
        if not all(counts):
            raise ConfigurationError(f"{pair.files[counts.index(0)]} is empty: put its text there, or remove it")
        if len(set(counts)) > 1:
            both = f"{pair.source} has {counts[0]:,} lines, {pair.target} has {counts[1]:,}"
            raise ConfigurationError(f"{both}: they are read line by line, so mend or remove both")
        if pair.split == "train":
            lines[pair], samples[pair] = counts[0], sample
            unusable.update(defects)
    if not any(samples.values()):
        where = "data.train" if text.root is None else f"data.root={text.root}"
        found = next(iter(unusable.first.values()), "all are too long")
        raise ConfigurationError(f"{where}: no pair of lines has text on both sides; {found}")
    return lines, samples


def encode_all(
    text: ParallelText, folder: Path, corpora: Sequence[PairFiles], run_all: RunAll
) -> Iterator["EncodedPiece"]:
    """Yields the encoded pieces of a language's files: those of dev and test first, whose pairs are not trained on."""
    known = frozenset[int]()
    for is_training in (False, True):
        chosen = [pair for pair in corpora if (pair.split == "train") == is_training]
        jobs = ((text, folder, pair, rows, known) for pair in chosen for rows in read_pieces(pair, text.piece))
        held_out = list[HeldOutSample]()
        for encoded in run_all(encode, jobs):
            held_out += encoded.held_out
            yield encoded
        known = frozenset(pair_digest(sample.source, sample.reference) for sample in held_out)


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
        ConfigurationError: a vocabulary size does not fit the text; it names both sides if both do not fit.
    """
    refused = []
    for number, side in enumerate(SIDES[:1] if text.shared else SIDES):
        given, size = text.given[number], text.pieces[number]
        if given is not None:
            shutil.copyfile(given, folder / f"{side}{'.model' if given.endswith('.model') else '.json'}")
            continue
        columns = (0, 1) if text.shared else (number,)
        sentences = [pair[column] for pair in vocabulary_pairs(lines, samples) for column in columns]
        report(f"parallel text: {side} vocabulary, {size:,} pieces by {len(sentences):,} sentences", 0, 0)
        how = (text.character_coverage, f"{side}_vocabulary", text.smaller, text.normalization)
        try:
            (folder / f"{side}.model").write_bytes(train_vocabulary(sentences, size, *how))
        except ConfigurationError as error:
            refused.append(str(error))
    if refused:
        raise ConfigurationError("\n".join(refused))


def vocabulary_pairs(lines: Lines, samples: Samples) -> Iterator[tuple[str, str]]:
    """Yields the pairs to train vocabularies on, drawn with temperature; those of small languages may repeat."""
    total = min(VOCABULARY_PAIRS, sum(lines.values()))
    for pair, share in shares_of(lines).items():
        sample = samples[pair]
        wanted = max(1, int(share * total)) if sample else 0
        # Evenly spread over the sample, or the whole sample several times.
        places = (i * len(sample) // wanted if wanted < len(sample) else i % len(sample) for i in range(wanted))
        yield from (sample[place] for place in places)


# -- lines -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Holds a line as bytes.

    Attributes:
        number: its number in its file, from 1.
        columns: source and target, another number in a malformed line of TSV, one for a record.
    """

    number: int
    columns: Sequence[bytes]


class Line(NamedTuple):
    """Holds a pair of texts and the number of its line, from 1."""

    number: int
    source: str
    target: str


def read_pieces(files: PairFiles, size: int) -> Iterator[list[Row]]:
    """Yields the lines in pieces of ``size``, up to the end of the shorter file. Only a line feed ends a line."""
    columns: Iterator[Sequence[bytes]] = zip(*map(_lines, files.files), strict=False)
    if files.target is None and files.columns is None:
        columns = (line.rstrip(b"\r\n").split(b"\t")[:: -1 if files.turned else 1] for (line,) in columns)
    rows = starmap(Row, enumerate(columns, 1))
    while piece := list(islice(rows, size)):
        yield piece


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, which may be compressed."""
    with reading(path) as file:
        yield from file


def readable(files: PairFiles, rows: Sequence[Row], defects: Defects) -> list[Line]:
    """Returns the texts of the lines that can be read; counts the defects of the others."""
    lines = []
    for row in rows:
        try:
            lines.append(Line(row.number, *texts_of(files, row)))
        except BadLine as bad:
            defects.add(bad.kind, f"{files.files[-1 if bad.side else 0]}, line {row.number}", bad)
    return lines


def texts_of(files: PairFiles, row: Row) -> list[str]:
    """Returns both sides of a line, without blanks at their ends.

    Raises:
        BadLine: one cannot be read, or is empty.
    """
    texts = [decoded(line, side) for side, line in enumerate(row.columns)]
    if files.columns is not None:
        texts = texts_in(texts[0], files.columns, "data.columns")
    if len(texts) != 2:
        raise BadLine("malformed")
    texts = [text.strip() for text in texts]
    if not all(texts):
        side = texts.index("")
        raise BadLine("empty", f"{SIDES[side]} {KINDS['empty']}", side)
    return texts


def usable_lines(
    files: PairFiles,
    rows: Sequence[Row],
    vocabularies: tuple[AnyVocabulary, AnyVocabulary],
    max_length: int,
    defects: Defects,
) -> list[tuple[Line, tuple[list[int], list[int]]]]:
    """Returns the lines that can be read and are short enough, with the ids of both sides; counts the others' defects.

    Args:
        vocabularies: those of source and target.
        max_length: most tokens of a side, with its end token.
    """
    lines, usable = readable(files, rows, defects), []
    sources = vocabularies[0].encode([line.source for line in lines], threads=1)
    targets = vocabularies[1].encode([line.target for line in lines], threads=1)
    for line, ids in zip(lines, zip(sources, targets, strict=True), strict=True):
        longest = max(map(len, ids)) + 1
        if longest <= max_length:
            usable.append((line, ids))
        else:
            found = f"{KINDS['too_long']}: {longest:,} tokens, data.max_length={max_length} tokens"
            defects.add("too_long", f"{files.source}, line {line.number}", found)
    return usable


# -- jobs --------------------------------------------------------------------------------------------------------------


class EncodedPiece(NamedTuple):
    """Holds a piece's training pairs, in the form of `interleave`, and those that are held out.

    Attributes:
        lines: number of pairs of lines in files to train on.
    """

    lines: int
    tokens: Tokens
    lengths: Lengths
    held_out: list[HeldOutSample]
    defects: Defects


def scan(pair: PairFiles, wanted: int, size: int) -> tuple[list[int], list[tuple[str, str]], Defects]:
    """Returns the number of lines of each file, an even sample of its pairs, and the defects of the sample's lines.

    Args:
        wanted: pairs to sample; up to twice as many are returned, fewer where lines cannot be read.
        size: lines read at a time.

    Raises:
        ConfigurationError: a file is a torn archive.
    """
    sample, defects = EvenSample[Row](wanted), Defects()
    for rows in read_pieces(pair, size):
        sample.extend(rows)
    texts = [(line.source, line.target) for line in readable(pair, sample.kept, defects)]
    lines = [sample.total] if pair.target is None else [sum(1 for _ in _lines(path)) for path in pair.files]
    return lines, [both for both in texts if max(map(len, both)) <= LONGEST_SAMPLE], defects


def encode(
    text: ParallelText, folder: Path, files: PairFiles, rows: Sequence[Row], known: frozenset[int]
) -> EncodedPiece:
    """Returns the ids of a piece's training pairs, and its pairs of dev and test.

    Args:
        folder: the vocabularies' folder.
        rows: the lines of the piece.
        known: digests of the language's pairs in dev and test files, which are not trained on, see `pair_digest`.
    """
    vocabularies, defects = vocabularies_in(folder), Defects()
    trained, held_out = list[tuple[list[int], list[int]]](), list[HeldOutSample]()
    for line, ids in usable_lines(files, rows, vocabularies, text.max_length, defects):
        split = text.split_of(files, line.target)
        if split != "train":
            held_out.append(HeldOutSample(split, files.language, line.source, line.target))
        elif pair_digest(line.source, line.target) in known:
            defects.add("held_out", f"{files.source}, line {line.number}")
        else:
            trained.append(ids)
            if line.source == line.target:
                defects.add(KEPT, f"{files.source}, line {line.number}")
    lines = len(rows) if files.split == "train" else 0
    return EncodedPiece(lines, *interleave(trained, token_kind(*vocabularies)), held_out, defects)


def pair_digest(source: str, target: str) -> int:
    """Returns 64 bits that tell one pair of texts from others."""
    return int.from_bytes(hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def vocabularies_in(folder: Path) -> tuple[AnyVocabulary, AnyVocabulary]:
    """Returns the vocabularies of source and target, which each process reads once."""
    return read_both(folder)
