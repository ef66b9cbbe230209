"""Yields mini-batches of the CLDR corpus: translation into English (`data=cldr`), or text (`data=cldr_text`)."""

from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...typed_section import Count, Examples, Names, Seed, Temperature, Tokens
from ..prepared import PreparedSource
from ..source import Report, permutation
from ..store import Numbers, Store, places_of
from ..translation import PairSource
from ..vocabulary import BOS, EOS, PAD
from ..windows import WindowSource
from .corpus import CorpusParameters, open_store
from .languages import RANK, check_languages

PACKED_AT_ONCE = 20_000  # pairs


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

    def _open(self, report: Report) -> Store:
        return open_store(self.parameters, self._cache_dir, report)

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
        pieces = []
        for first in range(0, len(order), PACKED_AT_ONCE):
            report("text: one stream of tokens", first, len(order))
            pieces.append(_packed(store, order[first : first + PACKED_AT_ONCE]))
        self._training = np.concatenate(pieces)
        self._require_a_window()
        languages = groupby(store.held_out("dev"), attrgetter("language"))
        chosen = [pair for _, pairs in languages for pair in islice(pairs, self._evaluation_per_language)]
        ids = self.encode([text for pair in chosen for text in (pair.source, pair.target)])
        self._held_out = np.array([token for of_text in ids for token in (*of_text, EOS)], np.int64)


def _packed(store: Store, pairs: Numbers) -> npt.NDArray[np.uint16]:
    """Returns source, end token, target, end token of each pair."""
    sides = store.gather(pairs)
    lengths = np.stack([side[1] + 1 for side in sides], axis=1).reshape(-1)
    starts = (np.cumsum(lengths) - lengths).reshape(-1, 2)
    row = np.full(int(lengths.sum()), EOS, np.uint16)
    for column, (tokens, of_side) in enumerate(sides):
        row[places_of(starts[:, column], of_side)] = tokens
    return row
