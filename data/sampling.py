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

    Args:
        sizes: items of each collection, none empty.
        temperature: see `temperature_shares`.
        chunk: items per chunk; a multiple of it is taken where a collection would miss out otherwise (`self.chunk`).
        seed: decides the order.
    """

    def __init__(self, sizes: Sequence[int], temperature: float, chunk: int, seed: int) -> None:
        self._sizes, self._seed = list(sizes), seed
        shares = temperature_shares(sizes, temperature)
        # Whole numbers from here on, so that a place far down the stream is as exact as the first one.
        weights = [max(1, round(float(share) * 2**40)) for share in shares]
        self._cumulative = np.cumsum([0, *weights]).tolist()
        needed = -(-self._cumulative[-1] // min(weights))
        self.chunk = chunk * max(1, -(-needed // chunk))
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def items(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Chunk `number`, shuffled: (collection, index within the collection) of each of its `chunk` items."""
        first, last = self._taken(number * self.chunk), self._taken((number + 1) * self.chunk)
        indices = [self._sequence(of, first[of], last[of]) for of in range(len(self._sizes))]
        collections = np.repeat(np.arange(len(indices)), [len(of) for of in indices])
        order = permutation(self.chunk, self._seed, "chunk", number)
        return collections[order], np.concatenate(indices)[order]

    def _taken(self, place: int) -> list[int]:
        """How many items of each collection stand before stream place `place`."""
        floors = [bound * place // self._cumulative[-1] for bound in self._cumulative]
        return [high - low for low, high in pairwise(floors)]

    def _sequence(self, of: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Items number `first` … `last` − 1 of a collection's endless sequence."""
        size, pieces = self._sizes[of], []
        while first < last:
            epoch, start = divmod(first, size)
            stop = min(size, start + last - first)
            pieces.append(self._order(of, epoch)[start:stop])
            first += stop - start
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _order(self, of: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._orders.get(of, (None,))[0] != epoch:
            self._orders[of] = (epoch, permutation(self._sizes[of], self._seed, of, epoch))
        return self._orders[of][1]
