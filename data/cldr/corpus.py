"""The CLDR corpus as a store: made once per CLDR version and parameters, in a folder whose name tells both.

It is written beside its place and moved there in one step, so that a reader never sees half of it; of two builders at
once, either one wins.
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

import numpy as np

from ...cpu import usable_cores
from ...errors import ConfigurationError
from ..sampling import temperature_shares
from ..source import Report, check_limits
from ..store import FORMAT, LONGEST, Sizes, Store, Trained, interleave, target_widths, write_description, write_shard
from ..vocabulary import Vocabulary, train_vocabulary
from ..workers import Workers
from .pairs import Pair, check_languages, corpus_size, held_out_pairs, train_pairs
from .strings import cldr_version

VOCABULARY_PAIRS = 56_000  # sentences shown to SentencePiece: more cost time and change little
VOCABULARY_TEMPERATURE = 5.0
ABANDONED_SECONDS = 24 * 3600
SMALL = 50_000  # pairs, composed in about two seconds

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
    max_length: int = LONGEST  # tokens of a side, its mark included; longer pairs are left out

    @classmethod
    def checked(
        cls,
        languages: Sequence[str] | None,
        largest: int,
        smallest: int,
        vocabulary: int,
        corpus_seed: int,
        max_length: int = LONGEST,
    ) -> CorpusParameters:
        """The parameters from the keys of a YAML file.

        Raises:
            ValueError: a value out of its limits, or a language that is not in the table.
        """
        check_limits(
            smallest=(smallest, 1, None),
            largest=(largest, smallest, None),
            vocabulary=(vocabulary, 8, 65_536),
            max_length=(max_length, 8, LONGEST),
        )
        return cls(tuple(check_languages(languages)), largest, smallest, vocabulary, corpus_seed, max_length)

    @property
    def sizes(self) -> dict[str, int]:
        """Training pairs wanted of each language."""
        return {code: corpus_size(code, self.largest, self.smallest) for code in self.languages}

    def folder(self) -> str:
        digest = hashlib.blake2b(json.dumps([FORMAT, asdict(self)]).encode(), digest_size=6).hexdigest()
        return f"translation-{cldr_version()}-{digest}"


def cache_folder(cache_dir: str | None) -> Path:
    """Where corpora are kept: `cache_dir`, or `$GPIPE_CACHE`, or `~/.cache/gpipe`."""
    return Path(cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()


def open_store(parameters: CorpusParameters, cache_dir: str | None, report: Report) -> Store:
    """Open the corpus, building it first if the cache does not hold it (about 25 s on two cores for all 102 languages).

    Args:
        cache_dir: None for `$GPIPE_CACHE`, or `~/.cache/gpipe` where that is not set.

    Raises:
        ConfigurationError: the vocabulary size does not suit the corpus, or `max_length` leaves a language no pair.
        OSError: the cache cannot be written.
    """
    cache = cache_folder(cache_dir)
    folder = cache / parameters.folder()
    if not folder.is_dir():
        draft = _draft(cache, folder.name)
        try:
            _build(parameters, draft, report)
            publish(draft, folder)
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


def publish(draft: Path, folder: Path) -> None:
    """Move a finished store to its place."""
    draft.chmod(0o755)
    try:
        draft.rename(folder)
    except OSError:  # another process was first: a folder is never replaced by one that has files in it
        if not folder.is_dir():
            raise


def _build(parameters: CorpusParameters, folder: Path, report: Report) -> None:
    with Workers(_worker_count(parameters)) as workers:
        corpus = _compose(parameters, workers, report)
        jobs = [(parameters, split) for split in ("dev", "test")]
        for (_, split), lines in zip(jobs, workers.map(_held_out_lines, jobs), strict=True):
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    report("translation corpus: vocabulary", 0, 1)
    model = train_vocabulary(_vocabulary_sentences(corpus), parameters.vocabulary)
    (folder / "source.model").write_bytes(model)
    vocabulary = Vocabulary(model)
    trained = {}
    for done, (code, pairs) in enumerate(corpus.items()):
        report("translation corpus: token ids", done, len(corpus))
        trained[code] = _write_language(folder, code, pairs, vocabulary, parameters.max_length)
    (folder / "NOTICE").write_text(NOTICE, encoding="utf-8")
    write_description(folder, trained, Sizes().block, {"cldr": cldr_version(), "parameters": asdict(parameters)})
    report("translation corpus", 1, 1)


def _worker_count(parameters: CorpusParameters) -> int:
    """They do not change a byte; a small corpus is done before other processes have started."""
    return 1 if sum(parameters.sizes.values()) < SMALL else usable_cores()


def _compose(parameters: CorpusParameters, workers: Workers, report: Report) -> dict[str, list[Pair]]:
    """The training pairs of each language."""
    corpus: dict[str, list[Pair]] = {}
    results = workers.map(_train_pairs, [(code, size, parameters.seed) for code, size in parameters.sizes.items()])
    for done, code in enumerate(parameters.languages):
        report("translation corpus: sentences", done, len(parameters.languages))
        corpus[code] = next(results)
    return corpus


def _train_pairs(job: tuple[str, int, int]) -> list[Pair]:
    return train_pairs(*job)


def _held_out_lines(job: tuple[CorpusParameters, str]) -> str:
    parameters, split = job
    return "".join(
        json.dumps([code, item, *pair], ensure_ascii=False) + "\n"
        for code in parameters.languages
        for item, pair in held_out_pairs(code, split, parameters.seed)
    )


def _write_language(folder: Path, code: str, pairs: Sequence[Pair], vocabulary: Vocabulary, max_length: int) -> Trained:
    """The pairs in their order, those too long left out."""
    sources, targets = (vocabulary.encode(side) for side in zip(*pairs, strict=True))
    kept = [i for i, (s, t) in enumerate(zip(sources, targets, strict=True)) if max(len(s), len(t)) < max_length]
    if not kept:
        raise ConfigurationError(f"data.max_length={max_length} leaves no pair of language '{code}': raise it")
    tokens, lengths = interleave([sources[i] for i in kept], [targets[i] for i in kept], wide=False)
    sizes = Sizes()
    ends = np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))])
    shards: list[int] = []
    for first in range(0, len(kept), sizes.shard):
        last = min(len(kept), first + sizes.shard)
        of_shard = tokens[ends[first] : ends[last]]
        write_shard(folder, code, len(shards), of_shard, lengths[first:last], sizes.block)
        shards.append(last - first)
    return Trained(shards, target_widths(lengths))


def _vocabulary_sentences(corpus: dict[str, list[Pair]]) -> Iterator[str]:
    """Both sides of pairs drawn with temperature, so that small languages get pieces of their own."""
    wanted = min(VOCABULARY_PAIRS, sum(map(len, corpus.values())))
    shares = temperature_shares([len(pairs) for pairs in corpus.values()], VOCABULARY_TEMPERATURE)
    for pairs, share in zip(corpus.values(), shares, strict=True):
        for number in range(max(1, int(share * wanted))):
            yield from pairs[number % len(pairs)]
