"""Makes text for a language model: both sides of the CLDR corpus as one stream of tokens, in equal blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ConfigurationError
from ..source import Batch, Report, check_limits, permutation, read_ahead, slices_of_replica, split_evenly
from ..store import Rows, Store
from ..vocabulary import BOS, EOS, PAD
from .corpus import CorpusParameters, open_store
from .pairs import HELD_OUT_ITEMS

if TYPE_CHECKING:
    from ...micro_batch import MicroBatch

PACKED_AT_ONCE = 20_000  # pairs


class TextSource:
    """Yields blocks of `sequence_length` tokens from "sentence end English end sentence end English end …".

    A micro-batch is `((ids [b, T],), (next_ids [b, T],))`, int64. The corpus is shuffled once; every epoch reads all
    blocks in another order. Only the last block of an evaluation has padding.

    Args:
        sequence_length: T, tokens of a block.
        batch_size: blocks of a mini-batch, over all micro-batches and replicas.
        languages, largest, smallest, vocabulary, corpus_seed, cache_dir: see `TranslationSource`, of the same corpus.
        evaluation_per_language: dev pairs of each language in `evaluation`.
        seed: decides the order of the pairs in the stream and of the blocks.

    Raises:
        ValueError: a value is outside its limits, or a language is not in the table.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(
        self,
        sequence_length: int = 128,
        batch_size: int = 16,
        languages: Sequence[str] | None = None,
        largest: int = 30_000,
        smallest: int = 100,
        vocabulary: int = 8_000,
        evaluation_per_language: int = 10,
        corpus_seed: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        self.parameters = CorpusParameters.checked(languages, largest, smallest, vocabulary, corpus_seed)
        check_limits(
            sequence_length=(sequence_length, 1, None),
            batch_size=(batch_size, 1, None),
            evaluation_per_language=(evaluation_per_language, 1, HELD_OUT_ITEMS),
        )
        self._length, self._batch_size, self._seed = sequence_length, batch_size, seed
        self._evaluation_per_language, self._cache_dir = evaluation_per_language, cache_dir
        self._store: Store | None = None
        self._stream = np.empty(0, np.uint16)

    def prepare(self, report: Report) -> None:
        """Builds the corpus unless it is cached, and reads all tokens into memory (2 bytes each).

        Raises:
            ConfigurationError: the corpus is shorter than one block.
        """
        self._store = store = open_store(self.parameters, self._cache_dir, report)
        sizes = list(store.sizes.values())
        rows = store.locate(np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes]))
        order = permutation(len(rows), self._seed, "stream")
        pieces = []
        for first in range(0, len(order), PACKED_AT_ONCE):
            report("text: one stream of tokens", first, len(order))
            pieces.append(_packed(store, rows.take(order[first : first + PACKED_AT_ONCE])))
        self._stream = np.concatenate(pieces)
        if self._blocks < 1:
            raise ConfigurationError(
                f"data.sequence_length={self._length}: the corpus has {len(self._stream)} tokens, less than one block: "
                "lower data.sequence_length or raise data.largest"
            )

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
        ids = torch.empty(-(-self._batch_size // micro_batches), self._length, dtype=torch.int64, device="meta")
        return ((ids,), (ids.clone(),)), self._batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"batch": n}`, the number of the next one."""
        slices = slices_of_replica(self._batch_size, M, replica, replicas, "data.batch_size")
        return read_ahead(self._train((position or {"batch": 0})["batch"], slices))

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields the dev pairs as one stream; the last block is filled up with padding."""
        stream = self._held_out_stream()
        inputs, targets = stream[:-1], stream[1:]
        blocks = -(-len(inputs) // self._length)
        ids, next_ids = np.full((2, blocks, self._length), PAD, np.int64)
        ids.reshape(-1)[: len(inputs)] = inputs
        next_ids.reshape(-1)[: len(targets)] = targets
        for first in range(0, blocks, self._batch_size):
            slices = split_evenly(min(self._batch_size, blocks - first), min(M, blocks - first, self._batch_size))
            rows = [slice(first + cut.start, first + cut.stop) for cut in slices]
            yield Batch([_micro_batch(ids[cut], next_ids[cut]) for cut in rows], first)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids up to the first end token."""
        return self._opened.source_vocabulary.decode(ids)

    def fingerprint(self) -> str:
        """Returns that of the corpus, which the order of reading does not change."""
        return self._opened.fingerprint()

    def epoch(self, position: Any) -> float:
        """Returns how often the whole text was read up to `position`."""
        return float((position or {"batch": 0})["batch"] * self._batch_size / self._blocks)

    @property
    def _opened(self) -> Store:
        if self._store is None:
            raise RuntimeError("TextSource: call prepare() before reading")
        return self._store

    @property
    def _blocks(self) -> int:
        return (len(self._stream) - 1) // self._length

    def _train(self, start: int, slices: list[slice]) -> Iterator[Batch]:
        known, order = -1, np.empty(0, np.int64)
        for number in count(start):
            places = []
            for index in range(number * self._batch_size, (number + 1) * self._batch_size):
                epoch, place = divmod(index, self._blocks)
                if epoch != known:
                    known, order = epoch, permutation(self._blocks, self._seed, "blocks", epoch)
                places.append(int(order[place]))
            rows = np.array(places)[:, None] * self._length + np.arange(self._length)
            ids, next_ids = self._stream[rows].astype(np.int64), self._stream[rows + 1].astype(np.int64)
            yield Batch([_micro_batch(ids[cut], next_ids[cut]) for cut in slices], {"batch": number + 1})

    def _held_out_stream(self) -> npt.NDArray[np.int64]:
        store, taken = self._opened, dict.fromkeys(self.parameters.languages, 0)
        texts = []
        for pair in store.held_out("dev"):
            if taken[pair.language] < self._evaluation_per_language:
                taken[pair.language] += 1
                texts += [pair.source, pair.target]
        return np.array([token for ids in store.source_vocabulary.encode(texts) for token in (*ids, EOS)], np.int64)


def _packed(store: Store, rows: Rows) -> npt.NDArray[np.uint16]:
    """Returns source, end token, target, end token of each pair."""
    sides = store.gather(rows)
    lengths = np.stack([side[1] + 1 for side in sides], axis=1).reshape(-1)
    starts = (np.cumsum(lengths) - lengths).reshape(-1, 2)
    row = np.full(int(lengths.sum()), EOS, np.uint16)
    for column, (tokens, of_side) in enumerate(sides):
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(of_side) - of_side, of_side)
        row[np.repeat(starts[:, column], of_side) + within] = tokens
    return row


def _micro_batch(ids: npt.NDArray[np.int64], next_ids: npt.NDArray[np.int64]) -> MicroBatch:
    return (torch.from_numpy(ids),), (torch.from_numpy(next_ids),)
