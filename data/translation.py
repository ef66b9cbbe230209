"""The default data: translation from 102 languages into English (paper, section 5), from the CLDR corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .cldr import HELD_OUT_ITEMS
from .languages import RANK, SCRIPTS
from .sampling import TemperatureSampler
from .source import Batch, Report, check_limits, parts_of_replica, permutation, read_ahead, split_evenly
from .store import CorpusParameters, HeldOutPair, Ragged, Store, open_store
from .vocabulary import BOS, EOS, PAD

if TYPE_CHECKING:
    from .source import Part

CHUNK_BATCHES = 64  # mini-batches that are sorted by length together
PAD_MULTIPLE = 8  # lengths are padded to few distinct ones: few shapes to allocate and to compile for
EVALUATION_BATCH = 64


class HeldOutSample(NamedTuple):
    """A sentence to translate; `source_ids` ends with the end mark, as the model reads it."""

    language: str
    source: str
    reference: str
    source_ids: list[int]


class TranslationSource:
    """Temperature-sampled mini-batches of translation pairs whose lengths are alike.

    A part is `((source [b, S], target_in [b, T]), (target_out [b, T],))`, int64: the source ends with the end mark,
    `target_in` begins with the beginning mark, `target_out` ends with the end mark, and padding follows.

    Args:
        batch_size: sentence pairs of a mini-batch, over all micro-batches and replicas.
        batch_tokens: if given, a mini-batch has about this many target tokens instead, padding not counted.
        temperature: languages are drawn with p ∝ pairs^(1/temperature).
        languages: CLDR codes; None for all 102. A language's pairs do not depend on the others chosen.
        largest, smallest: training pairs of the best and the least resourced language of the whole table.
        vocabulary: pieces of the joint vocabulary.
        max_length: pairs with more tokens on a side, marks included, are left out.
        evaluation_per_language: dev sentences of each language in `evaluation`.
        corpus_seed: decides the sentences of the corpus, held-out ones too; the same for every run that is compared.
        seed: decides the order of the batches.
        cache_dir: where corpora are kept; None for `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ValueError: a value out of its limits, a language that is not in the table.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(
        self,
        batch_size: int | None = 64,
        batch_tokens: int | None = None,
        temperature: float = 5.0,
        languages: Sequence[str] | None = None,
        largest: int = 30_000,
        smallest: int = 100,
        vocabulary: int = 8_000,
        max_length: int = 96,
        evaluation_per_language: int = 3,
        corpus_seed: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        self.parameters = CorpusParameters.checked(languages, largest, smallest, vocabulary, corpus_seed)
        if batch_size is None and batch_tokens is None:
            raise ValueError("data.batch_size=null needs data.batch_tokens: how large is a mini-batch?")
        check_limits(
            batch_size=(batch_size, 1, None),
            batch_tokens=(batch_tokens, 1, None),
            temperature=(temperature, 1, None),
            max_length=(max_length, 8, None),
            evaluation_per_language=(evaluation_per_language, 1, HELD_OUT_ITEMS),
        )
        self._pairs = batch_size or 1  # of a mini-batch; with batch_tokens, on average: prepare() counts
        self._batch_tokens = batch_tokens
        self._temperature, self._max_length, self._seed = temperature, max_length, seed
        self._evaluation_per_language, self._cache_dir = evaluation_per_language, cache_dir
        self._store: Store | None = None
        self._kept: list[npt.NDArray[np.int64]] = []  # of each language, the numbers of the pairs not too long

    def prepare(self, report: Report) -> None:
        """Build the corpus unless it is cached, and open it.

        Raises:
            ValueError: the vocabulary does not suit the corpus, or `max_length` leaves a language no pair.
        """
        self._store = store = open_store(self.parameters, self._cache_dir, report)
        fits = np.maximum(store.source.lengths, store.target.lengths) < self._max_length
        self._kept = [pairs.start + np.flatnonzero(fits[pairs.start : pairs.stop]) for pairs in store.ranges.values()]
        for code, numbers in zip(store.ranges, self._kept, strict=True):
            if not len(numbers):
                raise ValueError(f"data.max_length={self._max_length} leaves no pair of language '{code}': raise it")
        if self._batch_tokens is not None:
            tokens = np.concatenate([store.target.lengths[numbers] for numbers in self._kept])
            self._pairs = max(1, round(self._batch_tokens / (float(tokens.mean()) + 1)))

    def train(self, position: Any, parts: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Mini-batches without end; a position is `{"chunk": c, "batch": b}`, the next one to make."""
        start = position or {"chunk": 0, "batch": 0}
        if self._batch_tokens is None:
            parts_of_replica(self._pairs, parts, replica, replicas, "data.batch_size")
        return read_ahead(self._train(start["chunk"], start["batch"], parts, replica, replicas))

    def evaluation(self, parts: int) -> Iterator[Batch]:
        """`evaluation_per_language` dev sentences of each language, shortest first."""
        samples = self.held_out("dev", self._evaluation_per_language)
        targets = self._opened.vocabulary.encode([sample.reference for sample in samples])
        fitting = [i for i, ids in enumerate(targets) if len(ids) < self._max_length]
        order = sorted(fitting, key=lambda i: (len(targets[i]), len(samples[i].source_ids)))
        for first in range(0, len(order), EVALUATION_BATCH * parts):
            group = order[first : first + EVALUATION_BATCH * parts]
            yield Batch(
                [
                    _part([samples[i].source_ids[:-1] for i in group[part]], [targets[i] for i in group[part]])
                    for part in split_evenly(len(group), min(parts, len(group)))
                ],
                first,
            )

    def held_out(self, split: str = "dev", per_language: int | None = None) -> list[HeldOutSample]:
        """Held-out sentences ("dev" or "test") as texts and ids, `per_language` of each language (None: all, ≤ 300).

        Each language starts at another of the shared English items, so that few sentences still differ in English;
        which ones depends on nothing but the language. Sources longer than `max_length` are left out.
        """
        if split not in ("dev", "test"):
            raise ValueError(f"no held-out split '{split}': use 'dev' or 'test'")
        by_language: dict[str, list[HeldOutPair]] = {code: [] for code in self.parameters.languages}
        for pair in self._opened.held_out(split):
            by_language[pair.language].append(pair)
        chosen = [pair for code, pairs in by_language.items() for pair in _rotated(pairs, RANK[code], per_language)]
        sources = self._opened.vocabulary.encode([pair.source for pair in chosen])
        return [
            HeldOutSample(pair.language, pair.source, pair.target, [*ids, EOS])
            for pair, ids in zip(chosen, sources, strict=True)
            if len(ids) < self._max_length
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target ids, up to the first end mark."""
        return self._opened.vocabulary.decode(ids)

    def epoch(self, position: Any) -> float:
        """Pairs read up to `position`, in sizes of the corpus (of which small languages come round more often)."""
        start, sampler = position or {"chunk": 0, "batch": 0}, self._sampler()
        return float((start["chunk"] * sampler.chunk + start["batch"] * self._pairs) / sum(map(len, self._kept)))

    @property
    def sizes(self) -> dict[str, int]:
        """Training pairs of each language, once the corpus is open."""
        return {code: len(pairs) for code, pairs in self._opened.ranges.items()}

    @property
    def scripts(self) -> dict[str, str]:
        """The script of each language, as far as it is known."""
        return {code: SCRIPTS[code] for code in self.sizes if code in SCRIPTS}

    @property
    def _opened(self) -> Store:
        if self._store is None:
            raise RuntimeError("TranslationSource: call prepare() before reading")
        return self._store

    def _train(self, chunk: int, batch: int, parts: int, replica: int, replicas: int) -> Iterator[Batch]:
        store, sampler = self._opened, self._sampler()
        for number in count(chunk):
            batches = self._mini_batches(sampler, number)
            for place in range(batch, len(batches)):
                numbers = batches[place]
                slices = parts_of_replica(len(numbers), parts, replica, replicas, "data.batch_tokens")
                made = [_part_of_store(store, numbers[part]) for part in slices]
                yield Batch(made, {"chunk": number, "batch": place + 1})
            batch = 0

    def _sampler(self) -> TemperatureSampler:
        """A new one for each stream of batches: it remembers where it is."""
        sizes = [len(numbers) for numbers in self._kept]
        return TemperatureSampler(sizes, self._temperature, self._pairs * CHUNK_BATCHES, self._seed)

    def _mini_batches(self, sampler: TemperatureSampler, chunk: int) -> list[npt.NDArray[np.int64]]:
        """The pair numbers of each mini-batch of a chunk: alike in length within, in random order among them."""
        languages, indices = sampler.items(chunk)
        starts = np.cumsum([0, *map(len, self._kept)])
        numbers = np.concatenate(self._kept)[starts[languages] + indices]
        store = self._opened
        source, target = store.source.lengths[numbers] + 1, store.target.lengths[numbers] + 1
        # By padded target length, then by source: padding is then a fifth. Equal lengths stay as they were drawn.
        order = np.lexsort((source, -(-target // PAD_MULTIPLE)))
        if self._batch_tokens is None:
            cuts = np.arange(self._pairs, len(numbers), self._pairs)
        else:
            tokens = np.cumsum(target[order])
            batches = max(1, round(int(tokens[-1]) / self._batch_tokens))
            cuts = np.searchsorted(tokens, np.arange(1, batches) * tokens[-1] / batches)
        parts = np.split(numbers[order], cuts)
        return [parts[i] for i in permutation(len(parts), self._seed, "batches", chunk)]


def _rotated(pairs: list[HeldOutPair], rank: int, per_language: int | None) -> list[HeldOutPair]:
    wanted = len(pairs) if per_language is None else min(per_language, len(pairs))
    start = 0 if per_language is None else rank * per_language
    return [pairs[(start + i) % len(pairs)] for i in range(wanted)]


def _part_of_store(store: Store, numbers: npt.NDArray[np.int64]) -> Part:
    return _tensors(store.source.gather(numbers), store.target.gather(numbers))


def _part(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Part:
    return _tensors(_padded(sources), _padded(targets))


def _padded(sequences: Sequence[Sequence[int]]) -> Ragged:
    return (
        np.array([token for ids in sequences for token in ids], np.int64),
        np.array([len(ids) for ids in sequences], np.int64),
    )


def _tensors(source: Ragged, target: Ragged) -> Part:
    ends, begins = _grid(source, 0), _grid(target, 1)
    outs = _grid(target, 0)
    rows = np.arange(len(ends))
    ends[rows, source[1]] = EOS
    outs[rows, target[1]] = EOS
    begins[:, 0] = BOS
    return (torch.from_numpy(ends), torch.from_numpy(begins)), (torch.from_numpy(outs),)


def _grid(ragged: Ragged, shift: int) -> npt.NDArray[np.int64]:
    """Sequences as rows, `shift` places to the right, padded to a multiple of 8 with room for one mark."""
    ids, lengths = ragged
    width = -(-(int(lengths.max()) + 1) // PAD_MULTIPLE) * PAD_MULTIPLE
    grid = np.full((len(lengths), width), PAD, np.int64)
    columns = np.arange(width)[None, :] - shift
    grid[(columns >= 0) & (columns < lengths[:, None])] = ids
    return grid
