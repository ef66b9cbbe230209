"""Draws the order of sentences, by temperature (paper, section 5), and deals them over mini-batches.

Each mini-batch is a sample of all lengths; its micro-batches have similar lengths and equal cost. Lengths are padded to
few widths, and numbers of pairs are rounded. So there are few shapes to allocate, to send to other workers, and to
compile for. Only whole numbers are computed, so every platform makes the same mini-batches.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .source import permutation

Item = TypeVar("Item")
Numbers = npt.NDArray[np.int64]

PAD_MULTIPLE = 8
FINE_WIDTHS = 128  # up to here every multiple of 8 is a width, from here on there are four between n and 2n
GROUPS = 4  # of a mini-batch; with more, one of four micro-batches would span several and be padded more
ROUNDS = 6  # more change little
LEAST = 8  # a group has at least an eighth of the mean number of pairs


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
        blocks: number of items in each block of each collection; none is 0.
        temperature: T of `temperature_shares`.
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
        indices = [order.items(first[place], last[place]) for place, order in enumerate(self._orders)]
        collections = np.repeat(np.arange(len(indices)), [len(chosen) for chosen in indices])
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
    """Samples a sequence of unknown length evenly: keeps every stride-th item, from the first on.

    The stride doubles when too many are kept.

    Args:
        wanted: number of items to keep; up to twice as many are kept.

    Attributes:
        kept: the items of the sample.
        total: number of items of the sequence so far.
    """

    def __init__(self, wanted: int) -> None:
        self.kept: list[Item] = []
        self.total, self._stride, self._most = 0, 1, max(1, 2 * wanted)

    def extend(self, items: Sequence[Item]) -> None:
        """Goes through the next items of the sequence; thins the sample if it has become too large."""
        self.kept += items[-self.total % self._stride :: self._stride]
        self.total += len(items)
        while len(self.kept) > self._most:
            self._stride *= 2
            self.kept = self.kept[::2]


# -- mini-batches ------------------------------------------------------------------------------------------------------


def width_of(lengths: Numbers) -> Numbers:
    """Returns the widths that sequences of these lengths are padded to: 8, 16 … 128, 160 … 256, 320 …"""
    octaves = np.ceil(np.log2(np.maximum(lengths, FINE_WIDTHS) / FINE_WIDTHS)).astype(np.int64)
    step = np.where(octaves > 0, FINE_WIDTHS // 8 << np.maximum(octaves, 1), PAD_MULTIPLE)
    return np.asarray(-(-lengths // step) * step)


def dealt(source: Numbers, target: Numbers, count: int, equal_pairs: bool) -> list[list[Numbers]]:
    """Deals pairs over `count` mini-batches; returns the pairs' numbers in each group of each mini-batch.

    The pairs are sorted by width and cut into four parts, and each part into as many groups as there are mini-batches.
    A mini-batch gets one group of each part, short sentences first; its groups have nearly equal padded tokens. Every
    other part is dealt from its end, so that the mini-batches have similar mean lengths.

    Args:
        source, target: length of each side of each pair, with the end token; there are at least `count` pairs.
        equal_pairs: True gives mini-batches equal numbers of pairs; False gives all groups nearly equal padded tokens.
    """
    width = width_of(target)
    # Source lengths rise in one width and fall in the next, so that a group that spans two has similar sources.
    _, bucket = np.unique(width, return_inverse=True)
    padded = width_of(source)
    order = np.lexsort((np.where(bucket % 2, -padded, padded), width))
    tokens = np.cumsum((padded + width)[order])
    pairs = len(order) // count
    parts = min(GROUPS, pairs)
    if equal_pairs:
        bounds = _bounds_of_equal_pairs(tokens, parts, count)
    else:
        least = max(1, pairs // (LEAST * parts))
        bounds = _apart(_rounded(_places_of_shares(tokens, parts * count)), len(order), least)
    groups = np.split(order, bounds[1:-1])
    return [
        [groups[number] for number in column] for column in _turned(np.arange(parts * count).reshape(parts, count)).T
    ]


def least_pairs(mean: int) -> int:
    """Returns the fewest pairs that a mini-batch of `dealt` can have if the mean is `mean` pairs."""
    parts = min(GROUPS, mean)
    return parts * max(1, mean // (LEAST * parts))


def micro_batches(groups: Sequence[int], count: int) -> list[slice]:
    """Divides a mini-batch into consecutive micro-batches, each an equal share of its groups.

    Args:
        groups: pairs of each group, at least `count` in all.
    """
    ends = np.cumsum([0, *groups])
    return [slice(first, last) for first, last in pairwise(_apart(_shares(ends, count), int(ends[-1]), 1).tolist())]


def _bounds_of_equal_pairs(tokens: Numbers, parts: int, count: int) -> Numbers:
    """Returns where the groups begin and end, if mini-batches have equal numbers of pairs.

    The groups of a mini-batch have nearly equal tokens: their numbers of pairs are inverse to a pair's mean tokens.
    These means depend on where a group lies, and so on the sizes of the groups before it; some rounds make both agree.

    Args:
        tokens: running total of the pairs' padded tokens.
        parts: number of groups of a mini-batch.
        count: number of mini-batches.
    """
    pairs = len(tokens) // count
    step = _step(pairs)
    to_here = np.array([0, *tokens])
    sizes = np.full((parts, count), pairs // parts)
    for _ in range(ROUNDS):
        bounds = np.cumsum([0, *sizes.flat])
        rates = (sizes << 32) // np.diff(to_here[bounds]).reshape(sizes.shape)  # pairs a token
        ends = np.cumsum(_turned(rates), axis=0)
        ends = (pairs * ends // ends[-1] + step // 2) // step * step
        sizes = _turned(np.stack([np.diff(_apart(np.array([0, *column]), pairs, 1)) for column in ends.T], axis=1))
    return np.cumsum([0, *sizes.flat])


def _turned(parts: Numbers) -> Numbers:
    """Returns parts [parts, groups] with every other part reversed."""
    return np.stack([row[:: -1 if part % 2 else 1] for part, row in enumerate(parts)])


def _places_of_shares(tokens: Numbers, count: int) -> Numbers:
    """Returns the bounds, in pairs, of `count` equal shares of the tokens, 0 first.

    Args:
        tokens: running total of the pairs' padded tokens.
    """
    return np.asarray(np.searchsorted(tokens, tokens[-1] * np.arange(count + 1) // count, side="right"))


def _shares(ends: Numbers, count: int) -> Numbers:
    """Returns the bounds, in pairs, of `count` equal shares of the groups, 0 first; `ends` are the groups' bounds."""
    group, rest = np.divmod(np.arange(count + 1) * (len(ends) - 1), count)
    return np.asarray(ends[group] + np.diff(ends, append=ends[-1])[group] * rest // count)


def _rounded(bounds: Numbers) -> Numbers:
    """Moves bounds a little, so that there are few different distances between them."""
    steps = np.array([1, *map(_step, np.diff(bounds).tolist())])
    return np.asarray((bounds + steps // 2) // steps * steps)


def _apart(bounds: Numbers, last: int, least: int) -> Numbers:
    """Moves bounds so that they are at least `least` apart and end at `last`."""
    fewest = least * np.arange(len(bounds))
    moved = np.maximum.accumulate(np.array([*bounds[:-1], last]) - fewest) + fewest
    return np.asarray(np.minimum(moved, last - fewest[::-1]))


def _step(pairs: int) -> int:
    """Returns the step to which a number of pairs is rounded: the power of two in (pairs/64, pairs/32], at least 1."""
    return int(1 << max(0, (pairs // 32).bit_length() - 1))
