"""Translation (paper, section 5): mini-batches of sentence pairs from a store, whoever made it.

`TranslationSource` makes its store from CLDR, the default; `parallel_text.ParallelTextSource` from a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigurationError
from . import typical
from .cldr.corpus import CorpusParameters, open_store
from .cldr.languages import RANK, SCRIPTS
from .cldr.pairs import HELD_OUT_ITEMS
from .sampling import TemperatureSampler, temperature_shares
from .sentences import keep_vocabularies
from .source import Batch, Report, check_limits, permutation, read_ahead, slices_of_replica, split_evenly
from .store import HeldOutPair, Ragged, Rows, Store, Tokens
from .token_batches import balanced, by_count, by_tokens, pairs_by_width, width_of
from .vocabulary import BOS, EOS, PAD

if TYPE_CHECKING:
    from ..micro_batch import MicroBatch

CHUNK_BATCHES = 64  # mini-batches that are sorted by length together
CHUNK_PAIRS = 2**22  # ... but no more pairs than this: they are held in memory, 40 bytes each
EVALUATION_BATCH = 64
SPLITS = ("dev", "test")  # held-out sentences: to look at while training, and to compare by


class HeldOutSample(NamedTuple):
    """A sentence to translate; `source_ids` ends with the end mark, as the model reads it."""

    language: str
    source: str
    reference: str
    source_ids: list[int]


class PairSource:
    """Temperature-sampled mini-batches of translation pairs whose lengths are alike. A base: `_open` gives the store.

    A part is `((source [b, S], target_in [b, T]), (target_out [b, T],))`, int64: the source ends with the end mark,
    `target_in` begins with the beginning mark, `target_out` ends with the end mark, and padding follows.

    Args:
        batch_size: sentence pairs of a mini-batch, over all micro-batches and replicas; each part gets as many.
        batch_tokens: if given, a mini-batch has about this many target tokens instead, padding not counted, and its
            micro-batches are balanced in padded tokens.
        temperature: languages are drawn with p ∝ pairs^(1/temperature).
        max_length: the longest sequence of a batch, marks included.
        evaluation_per_language: held-out sentences of each language in `evaluation`.
        seed: decides the order of the batches.
        evaluation_split: which held-out sentences: "dev" or "test".

    Raises:
        ValueError: a value out of its limits.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS
    typical_lengths = (24, 16)  # padded, of source and target: the medians of CLDR batches with 4,000 pieces

    def __init__(
        self,
        batch_size: int | None,
        batch_tokens: int | None,
        temperature: float,
        max_length: int,
        evaluation_per_language: int,
        seed: int,
        evaluation_split: str = "dev",
    ) -> None:
        if evaluation_split not in SPLITS:
            raise ValueError(f"data.evaluation_split={evaluation_split}: use {' or '.join(SPLITS)}")
        if batch_size is None and batch_tokens is None:
            raise ValueError("data.batch_size=null needs data.batch_tokens: how large is a mini-batch?")
        check_limits(
            batch_size=(batch_size, 1, None),
            batch_tokens=(batch_tokens, 1, None),
            temperature=(temperature, 1, None),
            evaluation_per_language=(evaluation_per_language, 1, None),
        )
        self._pairs = batch_size or 1  # of a mini-batch; with batch_tokens, on average: prepare() counts
        self._batch_tokens = batch_tokens
        self._temperature, self._max_length, self._seed = temperature, max_length, seed
        self._evaluation_per_language = evaluation_per_language
        self.evaluation_split = evaluation_split
        self._pairs_by_width: dict[int, int] = {}
        self._store: Store | None = None

    def _open(self, report: Report) -> Store:
        raise NotImplementedError

    def _first_held_out(self, language: str, wanted: int) -> int:
        """Where a choice of `wanted` of the language's held-out sentences begins."""
        return 0

    def prepare(self, report: Report) -> None:
        """Build the corpus unless it is there, and open it.

        Raises:
            ConfigurationError: the vocabulary does not suit the corpus, or `max_length` leaves a language no pair.
        """
        self._store = store = self._open(report)
        if self._batch_tokens is not None:
            widths = _drawn_widths(store, self._temperature)
            self._pairs_by_width = pairs_by_width(widths, self._batch_tokens)
            share = sum(pairs / self._pairs_by_width[width] for width, (pairs, _) in widths.items())
            self._pairs = max(1, round(sum(pairs for pairs, _ in widths.values()) / share))

    def typical_micro_batch(self, M: int, longest: bool) -> tuple[MicroBatch, int]:
        """Shapes of a micro-batch, without data: see `typical`."""
        lengths = (self._max_length,) * 2 if longest else self.typical_lengths
        source, target = (min(length, self._max_length) for length in lengths)
        return typical.pairs(M, self._pairs, self._batch_tokens, source, target)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Mini-batches without end; a position is `{"chunk": c, "batch": b, "pairs": n}`, the next one to make.

        `pairs` is how many of the chunk's pairs were read; the order of the data does not need it, `epochs` does.
        """
        start = position or {"chunk": 0, "batch": 0, "pairs": 0}
        if self._batch_tokens is None:
            slices_of_replica(self._pairs, M, replica, replicas, "data.batch_size")
        else:
            self._check_parts(M * replicas)
        return read_ahead(self._train(start["chunk"], start["batch"], M, replica, replicas))

    def evaluation(self, M: int) -> Iterator[Batch]:
        """`evaluation_per_language` dev sentences of each language, shortest first."""
        samples = self.held_out(self.evaluation_split, self._evaluation_per_language)
        targets = self._opened.target_vocabulary.encode([sample.reference for sample in samples])
        fitting = [i for i, ids in enumerate(targets) if len(ids) < self._max_length]
        order = sorted(fitting, key=lambda i: (len(targets[i]), len(samples[i].source_ids)))
        for first in range(0, len(order), EVALUATION_BATCH * M):
            group = order[first : first + EVALUATION_BATCH * M]
            yield Batch(
                [
                    _part([samples[i].source_ids[:-1] for i in group[part]], [targets[i] for i in group[part]])
                    for part in split_evenly(len(group), min(M, len(group)))
                ],
                first,
            )

    def held_out(self, split: str = "dev", per_language: int | None = None) -> list[HeldOutSample]:
        """Held-out sentences ("dev" or "test") as texts and ids, `per_language` of each language (None: all).

        Which ones depends on nothing but the language. Sources longer than `max_length` are left out.
        """
        if split not in SPLITS:
            raise ValueError(f"no held-out split '{split}': use 'dev' or 'test'")
        by_language: dict[str, list[HeldOutPair]] = {code: [] for code in self._opened.languages}
        for pair in self._opened.held_out(split):
            by_language[pair.language].append(pair)
        chosen = [pair for code, pairs in by_language.items() for pair in self._chosen(code, pairs, per_language)]
        sources = self._opened.source_vocabulary.encode([pair.source for pair in chosen])
        return [
            HeldOutSample(pair.language, pair.source, pair.target, [*ids, EOS])
            for pair, ids in zip(chosen, sources, strict=True)
            if len(ids) < self._max_length
        ]

    def _chosen(self, code: str, pairs: list[HeldOutPair], per_language: int | None) -> list[HeldOutPair]:
        wanted = len(pairs) if per_language is None else min(per_language, len(pairs))
        start = 0 if per_language is None else self._first_held_out(code, per_language)
        return [pairs[(start + i) % len(pairs)] for i in range(wanted)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Source ids of each text, with the end mark, as the model reads them."""
        return [[*ids, EOS] for ids in self._opened.source_vocabulary.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target ids, up to the first end mark."""
        return self._opened.target_vocabulary.decode(ids)

    def keep_vocabularies(self, folder: Path) -> None:
        """Copies them to a folder from which `sentences.SentenceSource` translates without the corpus."""
        keep_vocabularies(self._opened.folder, folder)

    @property
    def sizes(self) -> dict[str, int]:
        """Training pairs of each language."""
        return self._opened.sizes

    @property
    def scripts(self) -> dict[str, str]:
        """The script of each language, as far as it is known."""
        return {code: SCRIPTS[code] for code in self.sizes if code in SCRIPTS}

    def fingerprint(self) -> str:
        """Of the corpus, not of the order in which it is read."""
        return self._opened.fingerprint()

    def epoch(self, position: Any) -> float:
        """Pairs read up to `position`, in sizes of the corpus (of which small languages come round more often)."""
        chunk, read = self._place(position)
        return float((chunk * self._chunk + read) / sum(self._opened.sizes.values()))

    def epochs(self, position: Any) -> dict[str, float]:
        """How often each language's pairs have been read up to `position`."""
        chunk, read = self._place(position)
        taken = self._sampler().taken(chunk * self._chunk + read)
        return {code: count / size for (code, size), count in zip(self._opened.sizes.items(), taken, strict=True)}

    def _place(self, position: Any) -> tuple[int, int]:
        """The chunk, and how many of its pairs have been read."""
        start = position or {"chunk": 0, "batch": 0}
        return start["chunk"], start.get("pairs", start["batch"] * self._pairs)

    @property
    def _opened(self) -> Store:
        if self._store is None:
            raise RuntimeError(f"{type(self).__name__}: call prepare() before reading")
        return self._store

    @property
    def _chunk(self) -> int:
        """Pairs of a chunk: whole mini-batches."""
        return self._pairs * max(1, min(CHUNK_BATCHES, CHUNK_PAIRS // self._pairs))

    def _sampler(self) -> TemperatureSampler:
        """A new one for each stream of batches: it remembers where it is."""
        return TemperatureSampler(self._opened.blocks(), self._temperature, self._chunk, self._seed)

    def _train(self, chunk: int, batch: int, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        sampler = self._sampler()
        mine = slice(replica * M, (replica + 1) * M)
        for number in count(chunk):
            rows = self._opened.locate(*sampler.items(number))
            batches = self._mini_batches(rows, number)
            opened: dict[int, Tokens] = {}  # files stay mapped for a chunk, not for ever
            read = sum(map(len, batches[:batch]))
            for place in range(batch, len(batches)):
                of_batch = rows.take(batches[place])
                read += len(of_batch)
                cuts = self._cuts(of_batch, M * replicas)[mine]
                made = [_tensors(*self._opened.gather(of_batch.take(cut), opened)) for cut in cuts]
                yield Batch(made, {"chunk": number, "batch": place + 1, "pairs": read})
            batch = 0

    def _check_parts(self, M: int) -> None:
        """A chunk's last mini-batch, of its longest sentences, may be half of one."""
        width, pairs = min(self._pairs_by_width.items(), key=lambda item: item[1])
        if pairs < 2 * M:
            raise ConfigurationError(
                f"data.batch_tokens={self._batch_tokens}: a mini-batch of the longest sentences has {pairs} pairs or "
                f"half, too few for {M} micro-batches: use data.batch_tokens={2 * M * width} or a lower pipeline.M"
            )

    def _cuts(self, rows: Rows, M: int) -> list[slice]:
        if self._batch_tokens is None:
            return split_evenly(len(rows), M)
        return balanced(rows.source + 1, rows.target + 1, M)

    def _mini_batches(self, rows: Rows, chunk: int) -> list[npt.NDArray[np.int64]]:
        """The places of each mini-batch's pairs in the chunk: alike in length within, in random order among them."""
        if self._batch_tokens is None:
            batches = by_count(rows.source + 1, rows.target + 1, self._pairs)
        else:
            batches = by_tokens(rows.source + 1, rows.target + 1, self._pairs_by_width)
        return [batches[i] for i in permutation(len(batches), self._seed, "batches", chunk)]


class TranslationSource(PairSource):
    """Translation from 102 languages into English, from the CLDR corpus.

    Args:
        batch_size, batch_tokens, temperature, evaluation_per_language, seed, evaluation_split: as of `PairSource`.
        languages: CLDR codes; None for all 102. A language's pairs do not depend on the others chosen.
        pair: one code, in place of `languages`: a bilingual run.
        largest, smallest: training pairs of the best and the least resourced language of the whole table.
        vocabulary: pieces of the joint vocabulary.
        max_length: pairs with more tokens on a side, marks included, are left out.
        corpus_seed: decides the sentences of the corpus, held-out ones too; the same for every run that is compared.
        cache_dir: where corpora are kept; None for `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ValueError: a value out of its limits, a language that is not in the table.
    """

    def __init__(
        self,
        batch_size: int | None = 64,
        batch_tokens: int | None = None,
        temperature: float = 5.0,
        languages: Sequence[str] | None = None,
        pair: str | None = None,
        largest: int = 30_000,
        smallest: int = 100,
        vocabulary: int = 8_000,
        max_length: int = 96,
        evaluation_per_language: int = 3,
        corpus_seed: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        evaluation_split: str = "dev",
    ) -> None:
        super().__init__(
            batch_size, batch_tokens, temperature, max_length, evaluation_per_language, seed, evaluation_split
        )
        check_limits(evaluation_per_language=(evaluation_per_language, 1, HELD_OUT_ITEMS))
        chosen = chosen_languages(languages, pair)
        self.parameters = CorpusParameters.checked(chosen, largest, smallest, vocabulary, corpus_seed, max_length)
        self._cache_dir = cache_dir

    def _open(self, report: Report) -> Store:
        return open_store(self.parameters, self._cache_dir, report)

    def _first_held_out(self, language: str, wanted: int) -> int:
        """Languages share their English items: each starts at another, so that few sentences differ in English."""
        return RANK[language] * wanted


def chosen_languages(languages: Sequence[str] | None, pair: str | None) -> Sequence[str] | None:
    """The languages that `data.languages` and `data.pair` ask for.

    Raises:
        ValueError: both are given.
    """
    if pair is None:
        return languages
    if languages is not None and list(languages) != [pair]:
        raise ValueError(
            f"data.pair={pair} is one language, data.languages={','.join(map(str, languages))} are others: "
            "leave out one of the keys"
        )
    return [pair]


def _drawn_widths(store: Store, temperature: float) -> dict[int, tuple[float, float]]:
    """Share of the pairs, and target tokens, of each target width, as temperature sampling draws them."""
    drawn: dict[int, tuple[float, float]] = {}
    shares = temperature_shares(list(store.sizes.values()), temperature)
    for share, of in zip(shares, store.languages.values(), strict=True):
        for width, (pairs, tokens) in of.widths.items():
            before = drawn.get(width, (0.0, 0.0))
            drawn[width] = (before[0] + share * pairs / of.pairs, before[1] + share * tokens / of.pairs)
    return dict(sorted(drawn.items()))


def _part(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> MicroBatch:
    return _tensors(_ragged(sources), _ragged(targets))


def _ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    return (
        np.array([token for ids in sequences for token in ids], np.int64),
        np.array([len(ids) for ids in sequences], np.int64),
    )


def _tensors(source: Ragged, target: Ragged) -> MicroBatch:
    ends, begins = _grid(source, 0), _grid(target, 1)
    outs = _grid(target, 0)
    rows = np.arange(len(ends))
    ends[rows, source[1]] = EOS
    outs[rows, target[1]] = EOS
    begins[:, 0] = BOS
    return (torch.from_numpy(ends), torch.from_numpy(begins)), (torch.from_numpy(outs),)


def _grid(ragged: Ragged, shift: int) -> npt.NDArray[np.int64]:
    """Sequences as rows, `shift` places to the right, padded to one of the widths with room for one mark."""
    ids, lengths = ragged
    width = int(width_of(lengths.max() + 1))
    grid = np.full((len(lengths), width), PAD, np.int64)
    columns = np.arange(width)[None, :] - shift
    grid[(columns >= 0) & (columns < lengths[:, None])] = ids
    return grid
