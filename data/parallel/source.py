"""Yields mini-batches from a folder of parallel text: `data=parallel_text data.root=FOLDER`."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...errors import ConfigurationError
from ...typed_section import Count, Examples, Names, Seed, Temperature, Tokens, Vocabulary
from ..cache import made_folder
from ..prepared import digest_of, stat_of, worker_count
from ..source import Report
from ..store import FORMAT, Store
from ..translation import PairSource
from ..vocabulary import SIDES, Normalization, file_named, read_vocabulary, require_room
from .folders import Files, find_pairs
from .preparation import ParallelText, prepare_pairs

log = logging.getLogger(__name__)


class ParallelTextSource(PairSource):
    """Reads pairs of sentences from a folder in one of the layouts of `folders.LAYOUTS`.

    Args:
        root: the folder.
        held_out: share of the pairs of a language without dev files that is held out, half for dev and half for test.
        train, dev, test: language -> files to use in place of those that are found: files of the source side, globs of
            them, or pairs of files.
        columns: names of source and target in JSON lines and Parquet; None: the codes of the languages.
        languages: source languages; None: all that are found.
        pair: one of them instead of `languages`, for a bilingual run.
        target: the language of the translations.
        source_vocabulary, target_vocabulary: pieces of each side's vocabulary; with a tokenizer its most ids.
        shared_vocabulary: one vocabulary for both sides; the two keys above must then be the same number.
        tokenizer: a run, a tokenizer.json or a SentencePiece .model for both sides, or two of these for [source,
            target]; None: SentencePiece is trained on the text.
        character_coverage: share of the text's characters that get pieces of their own.
        normalization: rule by which texts change before they become pieces, see `Normalization`.
        smaller_vocabulary: True: fewer pieces where the text supports fewer; False: it is refused.
        max_length: pairs with more tokens on a side, with its end token, are left out.
        preparation_workers: processes that prepare the text; None: one per core.
        batch_size, batch_tokens, temperature, evaluation_per_language, seed, evaluation_split: see `PairSource`.
        corpus_seed: decides the order of the pairs on the disk.
        cache_dir: folder of the store; None: `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ConfigurationError: the sizes of vocabularies contradict each other.
    """

    def __init__(
        self,
        root: str | None = None,
        train: Files | None = None,
        dev: Files | None = None,
        test: Files | None = None,
        columns: Annotated[Sequence[str], Field(min_length=2, max_length=2)] | None = None,
        languages: Names | None = None,
        pair: str | None = None,
        target: str = "en",
        source_vocabulary: Vocabulary = 64_000,
        target_vocabulary: Vocabulary = 32_000,
        shared_vocabulary: bool = False,
        tokenizer: str | Annotated[Sequence[str | None], Field(min_length=2, max_length=2)] | None = None,
        character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.999995,
        normalization: Normalization = "nmt_nfkc",
        smaller_vocabulary: bool = False,
        max_length: Annotated[int, Field(ge=8, le=65_535)] = 96,
        preparation_workers: Count | None = None,
        batch_size: Examples | None = None,
        batch_tokens: Tokens | None = 4_000,
        temperature: Temperature = 5.0,
        evaluation_per_language: Count | None = 20,
        corpus_seed: Seed = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        evaluation_split: Literal["dev", "test"] = "dev",
        held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.01,
    ) -> None:
        super().__init__(
            batch_size, batch_tokens, temperature, max_length, evaluation_per_language, seed, evaluation_split
        )
        self._cache_dir, self._workers, self._share, self._columns = cache_dir, preparation_workers, held_out, columns
        given = {"train": train, "dev": dev, "test": test}
        self._files = {split: files for split, files in given.items() if files is not None}
        pieces = source_vocabulary, target_vocabulary
        tokenizers = _files_of(tokenizer, pieces)
        # Vocabularies that are given are shared if they are one file, whatever shared_vocabulary says.
        shared = shared_vocabulary if tokenizers == (None, None) else tokenizers[0] == tokenizers[1]
        if shared_vocabulary and not (shared and source_vocabulary == target_vocabulary):
            raise ConfigurationError(
                "data.shared_vocabulary=true is one vocabulary for both sides: use one number for "
                "data.source_vocabulary and data.target_vocabulary, which the model reads, and one data.tokenizer"
            )
        chosen = languages if pair is None else [pair]
        wanted = None if chosen is None else tuple(chosen)
        vocabularies = (pieces, shared, character_coverage, smaller_vocabulary, normalization, tokenizers)
        self.text = ParallelText(root, wanted, target, *vocabularies, max_length, corpus_seed)

    def prepare(self, report: Report) -> None:
        """Prepares the text unless it is in the cache, opens it, and warns of its defects.

        A store is found again by the names, sizes and modification times of its files, and by `text`.

        Raises:
            ConfigurationError: a text cannot be used, or a vocabulary size does not fit it.
        """
        text = self.text
        pairs = find_pairs(text.root, text.languages, text.target, self._files, self._columns)
        there = {(pair.language, pair.split) for pair in pairs}
        lacking = [code for code, split in sorted(there) if split == "train" and (code, "dev") not in there]
        if lacking and self._share:
            splits = {code: [split for split in ("dev", "test") if (code, split) not in there] for code in lacking}
            self.text = text = replace(text, held_out=self._share, lacking=splits)

        def make(draft: Path) -> None:
            workers = worker_count([file for pair in pairs for file in pair.files], self._workers)
            prepare_pairs(text, draft, pairs, workers, report)

        own = [stat_of(Path(file)) for file in text.given if file is not None]
        of_pairs = [[pair.language, pair.split, pair.columns, pair.turned, *map(stat_of, pair.files)] for pair in pairs]
        name = f"parallel-{digest_of(FORMAT, asdict(text), of_pairs, own)}"
        self._use(Store(made_folder(self._cache_dir, name, make, report)))
        store, sides = self._store, {}
        vocabularies = store.source_vocabulary, store.target_vocabulary
        for side, given, size, vocabulary in zip(SIDES, self.text.given, self.text.pieces, vocabularies, strict=True):
            if given is not None and vocabulary.first:
                told = "ids of %s come after 0 to 3: weights that another library saved for them do not fit"
                log.warning(told, given)
            if given is None and not (self.text.shared and side == "target"):
                sides[f"{side}_vocabulary"] = size, vocabulary
        used = f"{sum(store.sizes.values()):,} of {store.lines:,} training pairs are used"
        self._warn(f"parallel text: {used}; in all splits", sides)


def _files_of(tokenizer: str | Sequence[str | None] | None, sizes: tuple[int, int]) -> tuple[str | None, str | None]:
    """Returns the paths of the vocabularies of source and target that data.tokenizer names.

    Raises:
        ConfigurationError: one is no vocabulary, or has more ids than its size.
    """
    names = (tokenizer, tokenizer) if tokenizer is None or isinstance(tokenizer, str) else tuple(tokenizer)
    found = [None if name is None else file_named(name, side) for name, side in zip(names, SIDES, strict=True)]
    for file, side, size in zip(found, SIDES, sizes, strict=True):
        if file is not None:
            require_room(f"{side}_vocabulary", size, file, read_vocabulary(file, of_pairs=True))
    source, target = (None if file is None else str(file) for file in found)
    return source, target
