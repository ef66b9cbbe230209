"""Yields mini-batches of the CLDR corpus, translation from 102 languages into English: `data=cldr`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...typed_section import Count, Examples, Names, Seed, Temperature
from ..source import Report
from ..store import Store
from ..translation import PairSource
from .corpus import CorpusParameters, open_store
from .languages import RANK, check_languages


class TranslationSource(PairSource):
    """Reads the CLDR corpus: translation from 102 languages into English.

    Args:
        batch_size, batch_tokens, temperature, evaluation_per_language, seed, evaluation_split: see `PairSource`.
        languages: CLDR codes; None: all 102. A language's pairs do not depend on the others chosen.
        pair: one code instead of `languages`, for a bilingual run.
        largest, smallest: training pairs of the first and the last language of the whole table.
        vocabulary: pieces of the joint vocabulary.
        smaller_vocabulary: where the corpus supports fewer pieces, the vocabulary has fewer; else it is refused.
        max_length: pairs with more tokens on a side, with its end token, are left out.
        corpus_seed: decides the sentences of the corpus, also held-out ones; runs to be compared need the same.
        cache_dir: folder of the corpora; None: `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ConfigurationError: a language is not in the table.
    """

    def __init__(
        self,
        batch_size: Examples | None = 64,
        batch_tokens: Examples | None = None,
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
