"""How sentences become mini-batches of alike lengths, and mini-batches become micro-batches that cost alike.

Lengths are padded to few widths, and with `batch_tokens` a mini-batch of one width always has the same number of
sentences, so that there are few shapes: few to allocate, to describe to other workers, to compile for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .source import split_evenly

Numbers = npt.NDArray[np.int64]

PAD_MULTIPLE = 8
NEARLY_EQUAL = (
    1.06  # the largest part over the mean: micro-batches of equal numbers of pairs are kept so far, for few shapes
)
FINE_WIDTHS = 128  # up to here every multiple of 8 is a width, from here on four to the octave


def width_of(lengths: Numbers) -> Numbers:
    """The width that sequences of these lengths, marks included, are padded to: 8, 16 … 128, 160 … 256, 320 …"""
    octaves = np.ceil(np.log2(np.maximum(lengths, FINE_WIDTHS) / FINE_WIDTHS)).astype(np.int64)
    step = np.where(octaves > 0, FINE_WIDTHS // 8 << np.maximum(octaves, 1), PAD_MULTIPLE)
    return np.asarray(-(-lengths // step) * step)


def by_count(source: Numbers, target: Numbers, pairs: int) -> list[Numbers]:
    """The pairs' numbers cut into mini-batches of `pairs` pairs, alike in length within.

    Args:
        source, target: lengths with their marks.
    """
    # By padded target length, then by source: padding is then a fifth. Equal lengths stay as they were drawn.
    order = np.lexsort((source, width_of(target)))
    return np.split(order, np.arange(pairs, len(order), pairs))


def pairs_by_width(widths: Mapping[int, tuple[float, float]], tokens: int) -> dict[int, int]:
    """How many pairs of each target width make a mini-batch of about `tokens` target tokens, padding not counted.

    Args:
        widths: pairs and target tokens of each width in the corpus.
    """
    return {width: _rounded(tokens * pairs / of_pairs) for width, (pairs, of_pairs) in widths.items() if pairs}


def _rounded(pairs: float) -> int:
    """To a thirty-second of itself or better: a multiple of a power of two, so that micro-batches are even."""
    step = _step(pairs)
    return max(1, round(pairs / step) * step)


def _step(pairs: float) -> int:
    """The power of two in (pairs/64, pairs/32], at least 1."""
    step: int = 1 << max(0, int(pairs // 32).bit_length() - 1)
    return step


def by_tokens(source: Numbers, target: Numbers, pairs_of: Mapping[int, int]) -> list[Numbers]:
    """The pairs' numbers cut into mini-batches of as many pairs as `pairs_of` says for their target width.

    A mini-batch that spans widths takes of each the share that is missing. What is left at the end joins the last
    mini-batch, or is one of its own if it is half of one.

    Args:
        source, target: lengths with their marks.
    """
    width = width_of(target)
    # Sources rise in one width and fall in the next: the sentences of a mini-batch that spans two are still alike.
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
    """What share of a mini-batch a pair of each width is."""
    known = np.array(sorted(pairs_of))
    return np.asarray(1 / np.array([pairs_of[int(w)] for w in known])[np.searchsorted(known, widths)])


def balanced(source: Numbers, target: Numbers, M: int) -> list[slice]:
    """Cuts a mini-batch into consecutive micro-batches whose padded tokens, source and target, are nearly equal.

    Cut at multiples of a power of two where there are pairs enough, for few shapes.

    Args:
        source, target: lengths with their marks, of at least `M` pairs, in the mini-batch's order.
        M: micro-batches of all replicas.
    """
    count = len(source)
    step = _step(count / M)
    widths = width_of(source), width_of(target)
    best = [slice(cut.start * step, min(count, cut.stop * step)) for cut in split_evenly(-(-count // step), M)]
    loads = [padded_tokens(source[part], target[part]) for part in best]
    if max(loads) <= NEARLY_EQUAL * sum(loads) / M:
        return best
    least, most = -(-int((widths[0] + widths[1]).sum()) // M), max(loads) - 1
    while least <= most:  # the smallest load of a part with which `M` of them take all pairs
        load = (least + most) // 2
        cuts = _filled(widths, M, load, step)
        if cuts is None:
            least = load + 1
        else:
            best, most = cuts, load - 1
    return best


def _filled(widths: tuple[Numbers, Numbers], M: int, load: int, step: int) -> list[slice] | None:
    """Parts filled one after the other up to `load` padded tokens, each leaving enough for the others; or None."""
    count, cuts, start = len(widths[0]), [], 0
    for left in range(M - 1, -1, -1):
        most = min(count - start - left, load // (2 * PAD_MULTIPLE))
        source, target = (np.maximum.accumulate(width[start : start + most]) for width in widths)
        fitting = int(np.searchsorted(np.arange(1, most + 1) * (source + target), load, side="right"))
        if left and fitting > step:
            fitting -= fitting % step
        if fitting < 1 or (not left and fitting < count - start):
            return None
        cuts.append(slice(start, start + fitting))
        start += fitting
    return cuts


def padded_tokens(source: Numbers, target: Numbers) -> int:
    """Source and target tokens of a part, padding included."""
    return len(source) * int(width_of(source.max()) + width_of(target.max()))
