"""Groups sentences of similar length into mini-batches, and divides these into micro-batches of equal cost.

Lengths are padded to few widths, and with `batch_tokens` a mini-batch of one width always has the same number of
sentences. So there are few shapes to allocate, to send to other workers, and to compile for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .source import split_evenly

Numbers = npt.NDArray[np.int64]

PAD_MULTIPLE = 8
NEARLY_EQUAL = 1.06  # largest load over the mean: up to here all micro-batches keep the same number of pairs
FINE_WIDTHS = 128  # up to here every multiple of 8 is a width, from here on there are four between n and 2n


def width_of(lengths: Numbers) -> Numbers:
    """Returns the widths that sequences of these lengths are padded to: 8, 16 … 128, 160 … 256, 320 …"""
    octaves = np.ceil(np.log2(np.maximum(lengths, FINE_WIDTHS) / FINE_WIDTHS)).astype(np.int64)
    step = np.where(octaves > 0, FINE_WIDTHS // 8 << np.maximum(octaves, 1), PAD_MULTIPLE)
    return np.asarray(-(-lengths // step) * step)


def by_count(source: Numbers, target: Numbers, pairs: int) -> list[Numbers]:
    """Returns the pairs' numbers in mini-batches of `pairs` pairs of similar length.

    Args:
        source, target: lengths with the end token.
    """
    # Sorted by padded target length, then by source, a fifth of all tokens is padding. Equal lengths keep their order.
    order = np.lexsort((source, width_of(target)))
    return np.split(order, np.arange(pairs, len(order), pairs))


def pairs_by_width(widths: Mapping[int, tuple[float, float]], tokens: int) -> dict[int, int]:
    """Returns how many pairs of each target width make a mini-batch of about `tokens` target tokens without padding.

    Args:
        widths: pairs and target tokens of each width in the corpus.
    """
    return {width: _rounded(tokens * pairs / of_pairs) for width, (pairs, of_pairs) in widths.items() if pairs}


def _rounded(pairs: float) -> int:
    """Returns a multiple of a power of two, at most 1/32 away, so that micro-batches can be equal."""
    step = _step(pairs)
    return max(1, round(pairs / step) * step)


def _step(pairs: float) -> int:
    """Returns the power of two in (pairs/64, pairs/32], at least 1."""
    step: int = 1 << max(0, int(pairs // 32).bit_length() - 1)
    return step


def by_tokens(source: Numbers, target: Numbers, pairs_of: Mapping[int, int]) -> list[Numbers]:
    """Returns the pairs' numbers in mini-batches of `pairs_of[width]` pairs of that target width.

    A mini-batch that spans widths is filled up with the missing share of the next width. The rest at the end joins the
    last mini-batch, or is one of its own if it is at least half of one.

    Args:
        source, target: lengths with the end token.
    """
    width = width_of(target)
    # Source lengths rise in one width and fall in the next, so that a mini-batch that spans two has similar sources.
    _, bucket = np.unique(width, return_inverse=True)
    padded = width_of(source)
    order = np.lexsort((np.where(bucket % 2, -padded, padded), width))
    share = np.cumsum(_shares(width[order], pairs_of))
    cuts, start = [0], 0
    while start < len(order):
        before = share[start - 1] if start else 0.0
        stop = int(np.searchsorted(share, before + 1 - 1e-6)) + 1
        if stop - start != pairs_of[int(width[order[start]])]:
            stop = start + _rounded(stop - start)
        cuts.append(min(stop, len(order)))
        start = cuts[-1]
    if len(cuts) > 2 and share[-1] - share[cuts[-2] - 1] < 0.5:
        del cuts[-2]
    return np.split(order, cuts[1:-1])


def _shares(widths: Numbers, pairs_of: Mapping[int, int]) -> npt.NDArray[np.float64]:
    """Returns the share of a mini-batch that one pair of each width takes."""
    known = np.array(sorted(pairs_of))
    return np.asarray(1 / np.array([pairs_of[int(w)] for w in known])[np.searchsorted(known, widths)])


def balanced(source: Numbers, target: Numbers, count: int) -> list[slice]:
    """Divides a mini-batch into consecutive micro-batches with nearly equal padded tokens, source and target together.

    It cuts at multiples of a power of two if there are enough pairs, for few shapes.

    Args:
        source, target: lengths with the end token, of at least `count` pairs, in the mini-batch's order.
        count: micro-batches of all replicas.
    """
    pairs = len(source)
    step = _step(pairs / count)
    widths = width_of(source), width_of(target)
    best = [slice(cut.start * step, min(pairs, cut.stop * step)) for cut in split_evenly(-(-pairs // step), count)]
    loads = [padded_tokens(source[cut], target[cut]) for cut in best]
    if max(loads) <= NEARLY_EQUAL * sum(loads) / count:
        return best
    least, most = -(-int((widths[0] + widths[1]).sum()) // count), max(loads) - 1
    while least <= most:  # bisects for the smallest largest load with which `count` micro-batches hold all pairs
        load = (least + most) // 2
        cuts = _filled(widths, count, load, step)
        if cuts is None:
            least = load + 1
        else:
            best, most = cuts, load - 1
    return best


def _filled(widths: tuple[Numbers, Numbers], count: int, load: int, step: int) -> list[slice] | None:
    """Fills micro-batches one after the other up to `load` padded tokens; returns None if not all pairs fit."""
    pairs, cuts, start = len(widths[0]), [], 0
    for left in range(count - 1, -1, -1):
        most = min(pairs - start - left, load // (2 * PAD_MULTIPLE))
        source, target = (np.maximum.accumulate(width[start : start + most]) for width in widths)
        fitting = int(np.searchsorted(np.arange(1, most + 1) * (source + target), load, side="right"))
        if left and fitting > step:
            fitting -= fitting % step
        if fitting < 1 or (not left and fitting < pairs - start):
            return None
        cuts.append(slice(start, start + fitting))
        start += fitting
    return cuts


def padded_tokens(source: Numbers, target: Numbers) -> int:
    """Returns the source and target tokens of these pairs, padding included."""
    return len(source) * int(width_of(source.max()) + width_of(target.max()))
