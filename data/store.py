"""The built corpus on disk: token ids in memory-mapped arrays, beside the vocabulary and the held-out texts.

A store is made once per CLDR version and parameters, in a folder whose name tells both. It is written beside its
place and moved there in one step, so that a reader never sees half of it; of two builders at once, either one wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .babel_strings import cldr_version
from .cldr import Pair, check_languages, corpus_size, held_out_pairs, train_pairs
from .sampling import temperature_shares
from .source import Report, check_limits
from .vocabulary import Vocabulary, train_vocabulary

FORMAT = 1  # raised when the same parameters would give another corpus
VOCABULARY_PAIRS = 56_000  # sentences shown to SentencePiece: more cost time and change little
VOCABULARY_TEMPERATURE = 5.0
ABANDONED_SECONDS = 24 * 3600

NOTICE = """\
Made from the Unicode Common Locale Data Repository (CLDR) as packaged by Babel.
Copyright © 2004-2025 Unicode, Inc. All rights reserved. Used under the Unicode License V3 (SPDX: Unicode-3.0),
https://www.unicode.org/license.txt; provided "AS IS", without warranty of any kind.
"""


@dataclass(frozen=True)
class CorpusParameters:
    """All that decides a corpus, besides CLDR's version."""

    languages: tuple[str, ...]
    largest: int
    smallest: int
    vocabulary: int  # at most 65,536: ids are stored in two bytes
    seed: int

    @classmethod
    def checked(
        cls, languages: Sequence[str] | None, largest: int, smallest: int, vocabulary: int, corpus_seed: int
    ) -> CorpusParameters:
        """The parameters from the keys of a YAML file.

        Raises:
            ValueError: a value out of its limits, or a language that is not in the table.
        """
        check_limits(
            smallest=(smallest, 1, None), largest=(largest, smallest, None), vocabulary=(vocabulary, 8, 65_536)
        )
        return cls(tuple(check_languages(languages)), largest, smallest, vocabulary, corpus_seed)

    def folder(self) -> str:
        digest = hashlib.blake2b(json.dumps([FORMAT, asdict(self)]).encode(), digest_size=6).hexdigest()
        return f"translation-{cldr_version()}-{digest}"


class HeldOutPair(NamedTuple):
    """A held-out sentence; `item` numbers the English item, which all languages share."""

    language: str
    item: int
    source: str
    target: str


Ragged = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Token ids of several sequences, one after the other, and the length of each sequence."""


class TokenColumn:
    """Many token sequences in one array, sequence i at `tokens[offsets[i]:offsets[i + 1]]`; memory-mapped."""

    def __init__(self, folder: Path, side: str) -> None:
        self.tokens: npt.NDArray[np.uint16] = np.load(folder / f"{side}.tokens.npy", mmap_mode="r")
        self.offsets: npt.NDArray[np.int64] = np.load(folder / f"{side}.offsets.npy", mmap_mode="r")
        self.lengths: npt.NDArray[np.int64] = np.diff(self.offsets)

    def gather(self, numbers: npt.NDArray[np.int64]) -> Ragged:
        """The sequences of the given numbers, in that order."""
        lengths = self.lengths[numbers]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.tokens[np.repeat(self.offsets[numbers], lengths) + within].astype(np.int64), lengths

    @staticmethod
    def write(folder: Path, side: str, sequences: Sequence[Sequence[int]]) -> None:
        lengths = np.fromiter((len(ids) for ids in sequences), np.int64, len(sequences))
        tokens = np.fromiter((token for ids in sequences for token in ids), np.uint16, int(lengths.sum()))
        np.save(folder / f"{side}.tokens.npy", tokens)
        np.save(folder / f"{side}.offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))


class Store:
    """An opened corpus.

    Attributes:
        source, target: the training sentences of all languages, one language after the other.
        ranges: the sequence numbers of each language.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocabulary = Vocabulary((folder / "vocabulary.model").read_bytes())
        self.source, self.target = TokenColumn(folder, "source"), TokenColumn(folder, "target")
        sizes: dict[str, int] = json.loads((folder / "corpus.json").read_text())["sizes"]
        ends = np.cumsum([0, *sizes.values()]).tolist()
        self.ranges = {code: range(ends[i], ends[i + 1]) for i, code in enumerate(sizes)}

    def held_out(self, split: str) -> list[HeldOutPair]:
        """All held-out sentences of "dev" or "test", language after language."""
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
            return [HeldOutPair(*json.loads(line)) for line in lines]


def open_store(parameters: CorpusParameters, cache_dir: str | None, report: Report) -> Store:
    """Open the corpus, building it first if the cache does not hold it (about 30 s for all 102 languages).

    Args:
        cache_dir: None for `$GPIPE_CACHE`, or `~/.cache/gpipe` where that is not set.

    Raises:
        ValueError: the vocabulary size does not suit the corpus.
        OSError: the cache cannot be written.
    """
    cache = Path(cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()
    folder = cache / parameters.folder()
    if not folder.is_dir():
        draft = _draft(cache, folder.name)
        try:
            _build(parameters, draft, report)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Store(folder)


def _draft(cache: Path, name: str) -> Path:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(".translation-*"):  # by builders that were killed
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    except OSError as error:
        raise OSError(f"cannot write the corpus to {cache} ({error}): set data.cache_dir or GPIPE_CACHE") from error


def _publish(draft: Path, folder: Path) -> None:
    draft.chmod(0o755)
    try:
        draft.rename(folder)
    except OSError:  # another process was first: a folder is never replaced by one that has files in it
        if not folder.is_dir():
            raise


def _build(parameters: CorpusParameters, folder: Path, report: Report) -> None:
    corpus: dict[str, list[Pair]] = {}
    for done, code in enumerate(parameters.languages):
        report("translation corpus: sentences", done, len(parameters.languages))
        size = corpus_size(code, parameters.largest, parameters.smallest)
        corpus[code] = train_pairs(code, size, parameters.seed)
    report("translation corpus: vocabulary", 0, 1)
    model = train_vocabulary(_vocabulary_sentences(corpus), parameters.vocabulary)
    (folder / "vocabulary.model").write_bytes(model)
    vocabulary = Vocabulary(model)
    pairs = [pair for of_language in corpus.values() for pair in of_language]
    for done, side in enumerate(("source", "target")):
        report("translation corpus: token ids", done, 2)
        TokenColumn.write(folder, side, vocabulary.encode([getattr(pair, side) for pair in pairs]))
    for split in ("dev", "test"):
        _write_held_out(folder / f"{split}.jsonl", parameters, split)
    sizes = {code: len(of_language) for code, of_language in corpus.items()}
    description = {"cldr": cldr_version(), "parameters": asdict(parameters), "sizes": sizes}
    (folder / "corpus.json").write_text(json.dumps(description, indent=1))
    (folder / "NOTICE").write_text(NOTICE, encoding="utf-8")
    report("translation corpus", 1, 1)


def _vocabulary_sentences(corpus: dict[str, list[Pair]]) -> Iterator[str]:
    """Both sides of pairs drawn with temperature, so that small languages get pieces of their own."""
    wanted = min(VOCABULARY_PAIRS, sum(map(len, corpus.values())))
    shares = temperature_shares([len(pairs) for pairs in corpus.values()], VOCABULARY_TEMPERATURE)
    for pairs, share in zip(corpus.values(), shares, strict=True):
        for number in range(max(1, int(share * wanted))):
            yield from pairs[number % len(pairs)]


def _write_held_out(path: Path, parameters: CorpusParameters, split: str) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for code in parameters.languages:
            for item, pair in held_out_pairs(code, split, parameters.seed):
                lines.write(json.dumps([code, item, *pair], ensure_ascii=False) + "\n")
