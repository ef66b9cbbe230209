"""Yields windows of one long sequence of tokens, for language models.

`cldr.source.TextSource` makes its sequence from CLDR, `text.source.TextFilesSource` from files.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch
from .sampling import EpochOrder
from .source import Batch, Source, evaluation_parts, read_ahead, slices_of_replica
from .vocabulary import PAD

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.integer[Any]]

TOGETHER = 2**22  # windows whose order is held in memory, 20 bytes each


class WindowSource(Source):
    """Yields mini-batches of windows of `sequence_length` tokens; each token is predicted from those before it.

    A micro-batch is `((ids [b, T],), (next_ids [b, T],))`, int64. Every epoch reads all windows in another order. Only
    the last window of an evaluation has padding. `prepare` of a subclass sets the tokens.

    Args:
        sequence_length: T, tokens of a window.
        batch_size: windows of a mini-batch, over all micro-batches and replicas.
        seed: decides the order of the windows.
        pad_id: the target in place of padding.
        evaluation_windows: number of windows of an evaluation, evenly spread over the held-out tokens; None: all.
    """

    _training: Ids
    _held_out: Ids

    def __init__(
        self, sequence_length: int, batch_size: int, seed: int, pad_id: int = PAD, evaluation_windows: int | None = None
    ) -> None:
        self._length, self._batch_size, self._seed = sequence_length, batch_size, seed
        self._pad_id, self._evaluation_windows = pad_id, evaluation_windows

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
        ids = torch.empty(-(-self._batch_size // micro_batches), self._length, dtype=torch.int64, device="meta")
        return ((ids,), (ids.clone(),)), self._batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"batch": n}`, the number of the next one."""
        slices = slices_of_replica(self._batch_size, M, replica, replicas, "data.batch_size")
        return read_ahead(self._train((position or {"batch": 0})["batch"], slices))

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields `evaluation_windows` windows, evenly spread over the held-out tokens. The last may end in padding."""
        tokens = self._held_out
        windows = -(-(len(tokens) - 1) // self._length)
        wanted = windows if self._evaluation_windows is None else min(windows, self._evaluation_windows)
        for parts in evaluation_parts(wanted, self._batch_size, M):
            made = [self._micro_batch(tokens, np.array(part) * windows // wanted) for part in parts]
            yield Batch(made, parts[0].start)

    def epoch(self, position: Any) -> float:
        """Returns how often the whole text was read up to `position`."""
        return float((position or {"batch": 0})["batch"] * self._batch_size / self._count())

    def _require_a_window(self) -> None:
        """Refuses a text that is shorter than a window.

        Raises:
            ConfigurationError: it is.
        """
        if self._count() < 1:
            raise ConfigurationError(
                f"there are {len(self._training):,} tokens to train on, less than a window: lower "
                f"data.sequence_length={self._length}, or give more text"
            )

    def _count(self) -> int:
        """Returns the number of windows that are trained on."""
        return (len(self._training) - 1) // self._length

    def _train(self, start: int, slices: list[slice]) -> Iterator[Batch]:
        """Yields these slices of each mini-batch without end, from mini-batch number `start` on."""
        tokens, windows = self._training, self._count()
        blocks = [min(TOGETHER, windows - first) for first in range(0, windows, TOGETHER)]
        order = EpochOrder(blocks, (self._seed, "blocks"))
        for number in count(start):
            chosen = order.items(number * self._batch_size, (number + 1) * self._batch_size)
            yield Batch([self._micro_batch(tokens, chosen[cut]) for cut in slices], {"batch": number + 1})

    def _micro_batch(self, tokens: Ids, chosen: Numbers) -> MicroBatch:
        """Returns windows by number: ids, and for each id the one that follows it; padding after the tokens' end."""
        places = chosen[:, None] * self._length + np.arange(self._length + 1)
        last = len(tokens) - 1
        ids = tokens[np.minimum(places, last)].astype(np.int64)
        known = places[:, 1:] <= last
        inputs, targets = np.where(known, ids[:, :-1], PAD), np.where(known, ids[:, 1:], self._pad_id)
        return (torch.from_numpy(inputs),), (torch.from_numpy(targets),)
