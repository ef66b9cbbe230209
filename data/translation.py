"""Yields mini-batches of sentence pairs for translation (paper, section 5) from a store.

`cldr.source.TranslationSource` makes its store from CLDR, `parallel.source.ParallelTextSource` from a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch
from .prepared import PreparedSource
from .sampling import TemperatureSampler, dealt, least_pairs, micro_batches, temperature_shares, width_of
from .source import Batch, HeldOutSample, evaluation_parts, permutation, read_ahead, slices_of_replica
from .store import Store
from .vocabulary import BOS, EOS, PAD

CHUNK_BATCHES = 64  # mini-batches whose pairs are sorted by length together
CHUNK_PAIRS = 2**22  # ... but no more pairs than this: they are held in memory, 40 bytes each
EVALUATION_BATCH = 64  # sentences of a micro-batch
TYPICAL_LENGTHS = (28, 18)  # padded source and target tokens that cost the mean of CLDR batches with 4,000 pieces
TOKENS_OF_WIDTH = 0.8  # share of a padded target that is not padding, in CLDR batches
Sequences = Sequence[Sequence[int] | npt.NDArray[Any]]


class PairSource(PreparedSource):
    """Yields temperature-sampled mini-batches of pairs. `prepare` of a subclass opens the store and calls `_use`.

    A mini-batch is a sample of all lengths. Its micro-batches hold pairs of similar lengths, and have nearly equal
    numbers of padded tokens.
    A micro-batch is `((source [b, S], target_in [b, T]), (target_out [b, T],))`, int64: the source ends with the end
    token, `target_in` begins with the beginning token, `target_out` ends with the end token, and padding follows.

    Args:
        batch_size: sentence pairs of a mini-batch, over all micro-batches and replicas.
        batch_tokens: target tokens of a mini-batch, about, without padding; None: batch_size decides.
        temperature: languages are drawn with p ∝ pairs^(1/temperature).
        max_length: tokens of the longest sequence, with its end token.
        evaluation_per_language: held-out sentences of each language in `evaluation`; None: all.
        seed: decides the order of the batches.
        evaluation_split: the held-out sentences to use: "dev" or "test".
    """

    _store: Store
    pad_id, bos_id, eos_id = PAD, BOS, EOS
    reads_ends = True

    def __init__(
        self,
        batch_size: int | None,
        batch_tokens: int | None,
        temperature: float,
        max_length: int,
        evaluation_per_language: int | None,
        seed: int,
        evaluation_split: str = "dev",
    ) -> None:
        if batch_size is None and batch_tokens is None:
            raise ConfigurationError("data.batch_size=null needs data.batch_tokens: how large is a mini-batch?")
        self._pairs = batch_size or 1  # of a mini-batch; with batch_tokens the mean, which prepare() counts
        self._batch_tokens = batch_tokens
        self._temperature, self._max_length, self._seed = temperature, max_length, seed
        self.evaluation_per_language = evaluation_per_language
        self.evaluation_split = evaluation_split

    def _first_held_out(self, language: str, wanted: int) -> int:
        """Returns the index of the first chosen sentence, if `wanted` of the language's held-out ones are chosen."""
        return 0

    def _use(self, store: Store) -> None:
        super()._use(store)
        self.sizes = store.sizes
        if self._batch_tokens is not None:
            self._pairs = max(1, round(self._batch_tokens / _mean_target(store, self._temperature)))

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch of usual or longest lengths on the meta device, and the examples of a mini-batch."""
        lengths = (self._max_length,) * 2 if longest else TYPICAL_LENGTHS
        source, target = (min(length, self._max_length) for length in lengths)
        examples = self._pairs
        if self._batch_tokens is not None:
            examples = max(micro_batches, round(self._batch_tokens / (TOKENS_OF_WIDTH * target)))
        shapes = [(-(-examples // micro_batches), length) for length in (source, target, target)]
        ids, target_in, target_out = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes)
        return ((ids, target_in), (target_out,)), examples

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"chunk": c, "batch": b}`, the next one to make."""
        start = position or {"chunk": 0, "batch": 0}
        fewest, key = self._pairs, "data.batch_size"
        if self._batch_tokens is not None:
            fewest, key = least_pairs(self._pairs), "data.batch_tokens"
        slices_of_replica(fewest, M, replica, replicas, key)
        return read_ahead(self._train(start["chunk"], start["batch"], M, replica, replicas))

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields `evaluation_per_language` held-out sentences of each language, shortest first."""
        samples = self.held_out(self.evaluation_split, self.evaluation_per_language)
        targets = self.target_vocabulary.encode([sample.reference for sample in samples])
        fitting = [i for i, ids in enumerate(targets) if len(ids) < self._max_length]
        order = sorted(fitting, key=lambda i: (len(targets[i]), len(samples[i].source_ids)))
        sides = [samples[i].source_ids[:-1] for i in order], [targets[i] for i in order]  # both without end tokens
        for parts in evaluation_parts(len(order), EVALUATION_BATCH * M, M):
            made = [_micro_batch(*(side[part.start : part.stop] for side in sides)) for part in parts]
            yield Batch(made, parts[0].start)

    def held_out(self, split: str = "dev", per_language: int | None = None) -> list[HeldOutSample]:
        """Returns held-out sentences ("dev" or "test") as texts and ids, `per_language` of each language (None: all).

        The choice depends on the language alone. Sources longer than `max_length` are left out.
        """
        languages = groupby(self._held_out_pairs(split), attrgetter("language"))
        chosen = [pair for code, pairs in languages for pair in self._chosen(code, list(pairs), per_language)]
        sources = self.encode([pair.source for pair in chosen])
        samples = [pair._replace(source_ids=ids) for pair, ids in zip(chosen, sources, strict=True)]
        return [sample for sample in samples if len(sample.source_ids) <= self._max_length]

    def _held_out_pairs(self, split: str) -> Iterator[HeldOutSample]:
        """Yields all held-out pairs, language after language."""
        return self._store.held_out(split)

    def _chosen(self, code: str, pairs: list[HeldOutSample], per_language: int | None) -> list[HeldOutSample]:
        """Returns the language's pairs to use: consecutive ones; behind the last comes the first."""
        if per_language is None:
            return pairs
        start = self._first_held_out(code, per_language)
        return [pairs[(start + i) % len(pairs)] for i in range(min(per_language, len(pairs)))]

    def epoch(self, position: Any) -> float:
        """Returns the pairs read up to `position` over the size of the corpus; small languages repeat more often."""
        start = position or {"chunk": 0, "batch": 0}
        # With `batch_tokens` the pairs within a chunk are an estimate.
        return float((start["chunk"] * self._chunk + start["batch"] * self._pairs) / sum(self._store.sizes.values()))

    @property
    def _chunk(self) -> int:
        """Returns the pairs of a chunk, a multiple of those of a mini-batch."""
        return self._pairs * max(1, min(CHUNK_BATCHES, CHUNK_PAIRS // self._pairs))

    def _train(self, chunk: int, batch: int, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields a replica's part of each mini-batch without end, from mini-batch `batch` of chunk `chunk` on."""
        sampler = TemperatureSampler(self._store.blocks(), self._temperature, self._chunk, self._seed)
        mine = slice(replica * M, (replica + 1) * M)
        for number in count(chunk):
            pairs = self._store.locate(*sampler.items(number))
            source, target = (self._store.lengths(pairs) + 1).T  # with the end token
            batches = dealt(source, target, len(pairs) // self._pairs, self._batch_tokens is None)
            order = permutation(len(batches), self._seed, "batches", number)
            for place in range(batch, len(batches)):
                groups = batches[order[place]]
                of_batch = pairs[np.concatenate(groups)]
                cuts = micro_batches([len(group) for group in groups], M * replicas)[mine]
                made = [_micro_batch(*self._store.gather(of_batch[cut])) for cut in cuts]
                yield Batch(made, {"chunk": number, "batch": place + 1})
            batch = 0


def _mean_target(store: Store, temperature: float) -> float:
    """Returns the mean target tokens of a pair, with the end token, after temperature sampling."""
    shares = temperature_shares(list(store.sizes.values()), temperature)
    summaries = zip(shares, store.languages.values(), strict=True)
    return float(sum(share * sum(tokens for _, tokens in it.widths.values()) / it.pairs for share, it in summaries))


def _micro_batch(sources: Sequences, targets: Sequences) -> MicroBatch:
    """Returns the micro-batch of ids of pairs, without end tokens: ((source, target_in), (target_out,))."""
    return (_rows(sources, (), (EOS,)), _rows(targets, (BOS,), ())), (_rows(targets, (), (EOS,)),)


def _rows(sequences: Sequences, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    """Returns a row for each sequence: the tokens `before` it, its own, those `after` it, then padding."""
    width = width_of(np.array(max(map(len, sequences)) + 1))
    rows = np.full((len(sequences), int(width)), PAD, np.int64)
    for row, ids in zip(rows, sequences, strict=True):
        first, last = len(before), len(before) + len(ids)
        row[:first], row[first:last], row[last : last + len(after)] = before, np.asarray(ids), after
    return torch.from_numpy(rows)
