"""Yields mini-batches of the CLDR corpus: translation into English (`data=cldr`), or text (`data=cldr_text`).

The corpus is built once for each CLDR version and parameters, as a store in the cache.
"""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ...cpu import usable_cores
from ...errors import ConfigurationError
from ...typed_section import Count, Examples, Names, Seed, Temperature, Tokens
from ..cache import made_folder
from ..defects import Defects
from ..prepared import PreparedSource, digest_of, in_processes
from ..sampling import temperature_shares
from ..source import HeldOutSample, Report, permutation
from ..store import FORMAT, LONGEST, Store, StoreWriter, interleave, token_kind
from ..translation import PairSource
from ..vocabulary import BOS, EOS, PAD, Vocabulary, train_vocabulary, warn_if_smaller
from ..windows import WindowSource
from .languages import RANK, check_languages, corpus_size
from .pairs import Pair, held_out_pairs, train_pairs
from .strings import cldr_version

log = logging.getLogger(__name__)

VOCABULARY_PAIRS = 56_000  # given to SentencePiece: more cost time and change little
VOCABULARY_TEMPERATURE = 5.0
SMALL = 50_000  # pairs, which one process composes in about two seconds


@dataclass(frozen=True)
class CorpusParameters:
    """Holds all that decides a corpus, besides CLDR's version."""

    languages: tuple[str, ...]
    largest: int
    smallest: int
    vocabulary: int  # at most 65,536: ids are stored in two bytes
    seed: int
    max_length: int = LONGEST  # tokens of a side with its end token; longer pairs are left out
    smaller_vocabulary: bool = False  # where the corpus supports fewer pieces

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the wanted number of training pairs of each language."""
        return {code: corpus_size(code, self.largest, self.smallest) for code in self.languages}

    def folder(self) -> str:
        return f"translation-{cldr_version()}-{digest_of(FORMAT, asdict(self))}"


def open_store(parameters: CorpusParameters, cache_dir: str | None, report: Report) -> Store:
    """Returns the corpus; builds it first if it is not in the cache (about 25 s on two cores for all 102 languages).

    Warns if the vocabulary is smaller than asked for.

    Raises:
        ConfigurationError: the vocabulary size does not fit the corpus, or `max_length` leaves a language no pair.
        DiskError: the cache cannot be written.
    """
    make = partial(_build, parameters, report=report)
    store = Store(made_folder(cache_dir, parameters.folder(), make, report))
    warn_if_smaller("vocabulary", parameters.vocabulary, store.source_vocabulary, log)
    return store


def _build(parameters: CorpusParameters, folder: Path, report: Report) -> None:
    """Composes the pairs, trains the vocabulary, and writes the store into a folder."""
    sizes, seed, corpus = parameters.sizes, parameters.seed, dict[str, list[Pair]]()
    with in_processes(1 if sum(sizes.values()) < SMALL else usable_cores()) as run_all:  # their number changes no byte
        drawn = run_all(train_pairs, [(code, size, seed) for code, size in sizes.items()])
        for code, pairs in zip(sizes, drawn, strict=True):
            report("translation corpus: sentences", len(corpus), len(sizes))
            corpus[code] = pairs
        jobs = [(code, split, seed) for split in ("dev", "test") for code in sizes]
        found = zip(jobs, run_all(held_out_pairs, jobs), strict=True)
        held_out = [HeldOutSample(split, code, *pair) for (code, split, _), pairs in found for pair in pairs]
    report("translation corpus: vocabulary", 0, 1)
    sentences = _vocabulary_sentences(corpus)
    model = train_vocabulary(sentences, parameters.vocabulary, smaller=parameters.smaller_vocabulary)
    (folder / "source.model").write_bytes(model)
    vocabulary, writer, defects = Vocabulary(model), StoreWriter(folder), Defects()
    for code, pairs in corpus.items():
        report("translation corpus: token ids", len(writer.languages), len(corpus))
        sides = [vocabulary.encode([pair[side] for pair in pairs]) for side in (0, 1)]
        kept = [ids for ids in zip(*sides, strict=True) if max(map(len, ids)) < parameters.max_length]
        if not kept:
            raise ConfigurationError(f"data.max_length={parameters.max_length} leaves no pair of language '{code}'")
        if len(kept) < len(pairs):
            defects.counts["too_long"] += len(pairs) - len(kept)
        writer.add(code, *interleave(kept, token_kind(vocabulary)))
    shutil.copyfile(Path(__file__).with_name("cldr.NOTICE"), folder / "NOTICE")
    writer.finish(held_out, defects)
    report("translation corpus", 1, 1)


def _vocabulary_sentences(corpus: dict[str, list[Pair]]) -> Iterator[str]:
    """Yields both sides of pairs to train the vocabulary on.

    Languages are drawn with temperature, so that small ones get pieces of their own.
    """
    wanted = min(VOCABULARY_PAIRS, sum(map(len, corpus.values())))
    shares = temperature_shares([len(pairs) for pairs in corpus.values()], VOCABULARY_TEMPERATURE)
    for pairs, share in zip(corpus.values(), shares, strict=True):
        for number in range(max(1, int(share * wanted))):
            yield from pairs[number % len(pairs)]


class TranslationSource(PairSource):
    """Reads the CLDR corpus: translation from 102 languages into English.

    Args:
        batch_size, batch_tokens, temperature, evaluation_per_language, seed, evaluation_split: see `PairSource`.
        languages: CLDR codes; None: all 102. A language's pairs do not depend on the others chosen.
        pair: one code instead of `languages`, for a bilingual run.
        largest, smallest: training pairs of the first and the last language of the whole table.
        vocabulary: pieces of the joint vocabulary.
        smaller_vocabulary: a corpus that supports fewer pieces gets a smaller vocabulary; else it is refused.
        max_length: pairs with more tokens on a side, with its end token, are left out.
        corpus_seed: decides the sentences of the corpus, also held-out ones; runs to be compared need the same.
        cache_dir: folder of the corpora; None: `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ConfigurationError: a language is not in the table.
    """

    def __init__(
        self,
        batch_size: Examples | None = 64,
        batch_tokens: Tokens | None = None,
        temperature: Temperature = 5.0,
        languages: Names | None = None,
        pair: str | None = None,
        largest: Count = 30_000,
        smallest: Count = 100,
        vocabulary: Annotated[int, Field(ge=8, le=65_536)] = 8_000,
        smaller_vocabulary: bool = False,
        max_length: Annotated[int, Field(ge=8, le=65_535)] = 96,
        evaluation_per_language: Annotated[int, Field(ge=1, le=300)] | None = 3,
        corpus_seed: Seed = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        evaluation_split: Literal["dev", "test"] = "dev",
    ) -> None:
        super().__init__(
            batch_size, batch_tokens, temperature, max_length, evaluation_per_language, seed, evaluation_split
        )
        codes = tuple(check_languages(languages if pair is None else [pair]))
        sizes = (largest, smallest, vocabulary)
        self.parameters = CorpusParameters(codes, *sizes, corpus_seed, max_length, smaller_vocabulary)
        self._cache_dir = cache_dir

    def prepare(self, report: Report) -> None:
        """Builds the corpus unless it is cached, and opens it; see `open_store`."""
        self._use(open_store(self.parameters, self._cache_dir, report))

    def _first_held_out(self, language: str, wanted: int) -> int:
        """Returns another start for each language, because all share the same English items."""
        return RANK[language] * wanted


class TextSource(WindowSource, PreparedSource):
    """Yields windows of "sentence end English end sentence end English end …"; the corpus is shuffled once.

    Args:
        sequence_length, batch_size: see `WindowSource`.
        languages, largest, smallest, vocabulary, corpus_seed, cache_dir: see `TranslationSource`, of the same corpus.
        evaluation_per_language: dev pairs of each language in `evaluation`.
        seed: decides the order of the pairs in the stream and of the windows.

    Raises:
        ConfigurationError: a language is not in the table.
    """

    _store: Store
    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(
        self,
        sequence_length: Count = 128,
        batch_size: Examples = 16,
        languages: Names | None = None,
        largest: Count = 30_000,
        smallest: Count = 100,
        vocabulary: Annotated[int, Field(ge=8, le=65_536)] = 8_000,
        evaluation_per_language: Annotated[int, Field(ge=1, le=300)] = 10,
        corpus_seed: Seed = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(sequence_length, batch_size, seed)
        codes = tuple(check_languages(languages))
        self.parameters = CorpusParameters(codes, largest, smallest, vocabulary, corpus_seed)
        self._evaluation_per_language, self._cache_dir = evaluation_per_language, cache_dir

    def prepare(self, report: Report) -> None:
        """Builds the corpus unless it is cached, and reads all tokens into memory (2 bytes each).

        Raises:
            ConfigurationError: the corpus is shorter than one block.
        """
        store = open_store(self.parameters, self._cache_dir, report)
        self._use(store)
        order = permutation(sum(store.sizes.values()), self._seed, "stream")
        report("text: one stream of tokens", 0, 0)
        texts = chain.from_iterable(zip(*store.gather(order), strict=True))  # a sentence, its English, the next …
        end = np.array([EOS], np.uint16)
        self._training = np.concatenate([part for ids in texts for part in (ids, end)])
        self._require_a_window()
        languages = groupby(store.held_out("dev"), attrgetter("language"))
        chosen = [pair for _, pairs in languages for pair in islice(pairs, self._evaluation_per_language)]
        ids = self.encode([text for pair in chosen for text in (pair.source, pair.reference)])
        self._held_out = np.array([token for of_text in ids for token in (*of_text, EOS)], np.int64)
