"""Makes text for a language model: both sides of the CLDR corpus as one stream of tokens, in equal blocks."""

from __future__ import annotations

from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...errors import ConfigurationError
from ...typed_section import Count, Examples, Names, Seed
from ..prepared import PreparedSource
from ..source import Report, permutation
from ..store import Rows, Store, places_of
from ..vocabulary import BOS, EOS, PAD
from ..windows import TokenSequence, WindowSource
from .corpus import CorpusParameters, open_store
from .languages import check_languages

PACKED_AT_ONCE = 20_000  # pairs


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
        sizes = list(store.sizes.values())
        rows = store.locate(np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes]))
        order = permutation(len(rows), self._seed, "stream")
        pieces = []
        for first in range(0, len(order), PACKED_AT_ONCE):
            report("text: one stream of tokens", first, len(order))
            pieces.append(_packed(store, rows[order[first : first + PACKED_AT_ONCE]]))
        self._stream = np.concatenate(pieces)
        if self._count() < 1:
            raise ConfigurationError(
                f"data.sequence_length={self._length}: the corpus has {len(self._stream)} tokens, less than one "
                "window: lower data.sequence_length or raise data.largest"
            )

    def _training_tokens(self) -> TokenSequence:
        return self._stream

    def _held_out_tokens(self) -> TokenSequence:
        languages = groupby(self._store.held_out("dev"), attrgetter("language"))
        chosen = [pair for _, pairs in languages for pair in islice(pairs, self._evaluation_per_language)]
        ids = self.encode([text for pair in chosen for text in (pair.source, pair.target)])
        return np.array([token for of_text in ids for token in (*of_text, EOS)], np.int64)


def _packed(store: Store, rows: Rows) -> npt.NDArray[np.uint16]:
    """Returns source, end token, target, end token of each pair."""
    sides = store.gather(rows)
    lengths = np.stack([side[1] + 1 for side in sides], axis=1).reshape(-1)
    starts = (np.cumsum(lengths) - lengths).reshape(-1, 2)
    row = np.full(int(lengths.sum()), EOS, np.uint16)
    for column, (tokens, of_side) in enumerate(sides):
        row[places_of(starts[:, column], of_side)] = tokens
    return row
