"""Which sentence comes when: temperature sampling (paper, section 5) that can start anywhere without a history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .source import permutation


def temperature_shares(sizes: Sequence[int], temperature: float) -> npt.NDArray[np.float64]:
    """p ∝ size^(1/T). T = 1 keeps the corpus' own shares, infinity gives every language the same."""
    weights = np.asarray(sizes, np.float64) ** (1 / temperature)
    return np.asarray(weights / weights.sum())


class TemperatureSampler:
    """An endless stream of items of many collections, in chunks, each a pure function of its number.

    Collection l yields its items in one random order after another: every item once per epoch. Before stream place x,
    exactly floor(P_l·x) − floor(P_{l−1}·x) items of collection l were taken, with P the cumulative shares; so shares
    are met to within one item at any time, and chunk c is known without chunks 0 … c − 1.

    The random order goes block by block: the blocks of an epoch in random order, and the items of a block in random
    order. What is read in one stretch of time then lies in one place on the disk, and memory holds one block's order a
    collection, however large the collection is.

    Args:
        blocks: of each collection, how many items each of its blocks has; none empty.
        temperature: see `temperature_shares`.
        chunk: items per chunk.
        seed: decides the order.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], temperature: float, chunk: int, seed: int) -> None:
        self._orders = [_EpochOrder(sizes, (seed, number)) for number, sizes in enumerate(blocks)]
        self._seed, self.chunk = seed, chunk
        shares = temperature_shares([order.size for order in self._orders], temperature)
        # Whole numbers from here on, so that a place far down the stream is as exact as the first one.
        weights = [max(1, round(float(share) * 2**40)) for share in shares]
        self._cumulative = np.cumsum([0, *weights]).tolist()

    def items(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Chunk `number`, shuffled: (collection, index within the collection) of each of its `chunk` items."""
        first, last = self.taken(number * self.chunk), self.taken((number + 1) * self.chunk)
        indices = [order.items(first[of], last[of]) for of, order in enumerate(self._orders)]
        collections = np.repeat(np.arange(len(indices)), [len(of) for of in indices])
        order = permutation(self.chunk, self._seed, "chunk", number)
        return collections[order], np.concatenate(indices)[order]

    def taken(self, place: int) -> list[int]:
        """How many items of each collection stand before stream place `place`."""
        floors = [bound * place // self._cumulative[-1] for bound in self._cumulative]
        return [high - low for low, high in pairwise(floors)]


class _EpochOrder:
    """One collection's endless sequence of items: every epoch all of them, in another order."""

    def __init__(self, blocks: Sequence[int], key: tuple[int, int]) -> None:
        self._starts = np.cumsum([0, *blocks])
        self.size = int(self._starts[-1])
        self._key = key
        self._epoch = -1
        self._order = self._places = np.empty(0, np.int64)  # this epoch's blocks, and the place where each begins
        self._known: tuple[int, int] = (-1, -1)  # (epoch, block) of `_within`
        self._within = np.empty(0, np.int32)

    def items(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Items number `first` … `last` − 1 of the sequence."""
        pieces = []
        while first < last:
            epoch, place = divmod(first, self.size)
            self._begin(epoch)
            turn = int(np.searchsorted(self._places, place, side="right")) - 1
            block = int(self._order[turn])
            start = place - int(self._places[turn])
            stop = min(int(self._places[turn + 1]) - int(self._places[turn]), start + last - first)
            pieces.append(int(self._starts[block]) + self._block(epoch, block)[start:stop].astype(np.int64))
            first += stop - start
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        blocks = np.diff(self._starts)
        self._epoch = epoch
        self._order = permutation(len(blocks), *self._key, epoch, "blocks")
        self._places = np.concatenate([[0], np.cumsum(blocks[self._order])])

    def _block(self, epoch: int, block: int) -> npt.NDArray[np.int32]:
        if self._known != (epoch, block):
            count = int(self._starts[block + 1] - self._starts[block])
            key = (*self._key, epoch) if len(self._starts) == 2 else (*self._key, epoch, block)
            self._within = permutation(count, *key).astype(np.int32)
            self._known = (epoch, block)
        return self._within
