"""Draws the order of sentences: temperature sampling (paper, section 5) that can start at any place."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .source import permutation

Item = TypeVar("Item")


def temperature_shares(sizes: Sequence[int], temperature: float) -> npt.NDArray[np.float64]:
    """Returns p ∝ size^(1/T). T = 1 keeps the corpus' own shares, infinity makes all shares equal."""
    weights = np.asarray(sizes, np.float64) ** (1 / temperature)
    return np.asarray(weights / weights.sum())


class TemperatureSampler:
    """Draws an endless stream of items of several collections, in chunks that depend on their number alone.

    Each collection yields its items in random order, every item once per epoch. Before place x of the stream, exactly
    floor(P_l·x) − floor(P_{l−1}·x) items of collection l were taken, with P the cumulative shares. So every share is
    exact to within one item at any time, and chunk c is known without chunks 0 … c − 1.

    The random order goes block by block: the blocks of an epoch in random order, and the items of a block in random
    order. Items read at one time then lie at one place on the disk, and memory holds the order of one block of each
    collection, however large the collection is.

    Args:
        blocks: for each collection, the number of items in each of its blocks; none is empty.
        temperature: see `temperature_shares`.
        chunk: items per chunk.
        seed: decides the order.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], temperature: float, chunk: int, seed: int) -> None:
        self._orders = [EpochOrder(sizes, (seed, number)) for number, sizes in enumerate(blocks)]
        self._seed, self.chunk = seed, chunk
        shares = temperature_shares([order.size for order in self._orders], temperature)
        # Whole numbers from here on, so that a place far down the stream is as exact as the first one.
        weights = [max(1, round(float(share) * 2**40)) for share in shares]
        self._cumulative = np.cumsum([0, *weights]).tolist()

    def items(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns chunk `number`, shuffled: (collection, index within the collection) of each of its items."""
        first, last = self.taken(number * self.chunk), self.taken((number + 1) * self.chunk)
        indices = [order.items(first[of], last[of]) for of, order in enumerate(self._orders)]
        collections = np.repeat(np.arange(len(indices)), [len(of) for of in indices])
        order = permutation(self.chunk, self._seed, "chunk", number)
        return collections[order], np.concatenate(indices)[order]

    def taken(self, place: int) -> list[int]:
        """Returns how many items of each collection come before `place` of the stream."""
        floors = [bound * place // self._cumulative[-1] for bound in self._cumulative]
        return [high - low for low, high in pairwise(floors)]


class EpochOrder:
    """Yields one collection's items without end: all of them in every epoch, each epoch in another order.

    Args:
        blocks: the number of items in each block.
        key: decides the order.
    """

    def __init__(self, blocks: Sequence[int], key: tuple[object, ...]) -> None:
        self._starts = np.cumsum([0, *blocks])
        self.size = int(self._starts[-1])
        self._key = key
        self._blocks = lru_cache(1)(self._shuffled_blocks)
        self._within = lru_cache(1)(self._shuffled_within)

    def items(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Returns items number `first` … `last` − 1 of the endless sequence."""
        pieces = []
        while first < last:
            epoch, place = divmod(first, self.size)
            order, places = self._blocks(epoch)
            turn = int(np.searchsorted(places, place, side="right")) - 1
            block = int(order[turn])
            start = place - int(places[turn])
            stop = min(int(places[turn + 1]) - int(places[turn]), start + last - first)
            pieces.append(int(self._starts[block]) + self._within(epoch, block)[start:stop].astype(np.int64))
            first += stop - start
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _shuffled_blocks(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns an epoch's blocks in their order, and the place where each begins."""
        blocks = np.diff(self._starts)
        order = permutation(len(blocks), *self._key, epoch, "blocks")
        return order, np.concatenate([[0], np.cumsum(blocks[order])])

    def _shuffled_within(self, epoch: int, block: int) -> npt.NDArray[np.int32]:
        """Returns the order of a block's items in an epoch."""
        key = (*self._key, epoch) if len(self._starts) == 2 else (*self._key, epoch, block)
        return permutation(int(self._starts[block + 1] - self._starts[block]), *key).astype(np.int32)


class EvenSample(Generic[Item]):
    """Holds every stride-th item of a sequence of unknown length, from the first one on.

    Args:
        wanted: items; up to twice as many are kept.

    Attributes:
        kept: items, each with its number in the sequence, from 0.
    """

    def __init__(self, wanted: int) -> None:
        self.stride, self.total = 1, 0
        self._most = max(1, 2 * wanted)
        self.kept: list[tuple[int, Item]] = []

    @property
    def items(self) -> list[Item]:
        return [item for _, item in self.kept]

    def places(self, count: int) -> range:
        """Returns which of the next `count` items are in the sample."""
        return range(-self.total % self.stride, count, self.stride)

    def keep(self, place: int, item: Item) -> None:
        """Takes the item at one of these places."""
        self.kept.append((self.total + place, item))

    def go_on(self, count: int) -> None:
        """Passes over the `count` items."""
        self.total += count
        while len(self.kept) > self._most:
            self.stride *= 2
            self.kept = [entry for entry in self.kept if entry[0] % self.stride == 0]
