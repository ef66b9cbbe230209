"""What a data source is, and the small helpers that every source of ours shares.

A source is any class with the three methods of `Source`; nothing has to be inherited. Only the first worker of a
replica reads it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch

Report = Callable[[str, int, int], None]
"""`report(text, done, total)`: what is being prepared, and how far it has come."""

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """One mini-batch, divided into its micro-batches.

    Attributes:
        micro_batches: `(inputs, targets)` of each: two tuples of CPU tensors whose first dimension counts examples.
            A source that pads may give micro-batches of equal cost instead of equal size.
        position: a JSON value; `source.train(position, …)` goes on after this batch.
    """

    micro_batches: list[MicroBatch]
    position: Any


class Source(Protocol):
    """Where mini-batches come from. `data._target_` names a class with these methods."""

    def prepare(self, report: Report) -> None:
        """Build or open whatever the batches need; called once, before the first batch."""

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Mini-batches without end, from just after `position` (None: from the start); one that ends ends the run.

        With D replicas a mini-batch has D·M micro-batches, and replica r reads r·M … (r+1)·M − 1.
        Same seed and position: same batches.
        """

    def evaluation(self, M: int) -> Iterator[Batch]:
        """The whole evaluation set once; the last batches may have fewer micro-batches."""

    # Optional: `typical_micro_batch` (data/typical.py), for plans made without data.
    # Optional: `epoch(position) -> float`, how often the data was read up to `position`; trainer.epochs needs it.
    # Optional: `evaluation_share(M, replica, replicas)`, of the mini-batches of `evaluation` the numbers replica,
    # replica + replicas, …: where reading is dear, so that replicas do not all read everything.
    # Optional: `defects`, a dict of counts (broken files, left-out lines) that goes into summary.json.
    # Optional: `fingerprint() -> str`, of the prepared training data: a run is not resumed with another one. The same
    # data have the same one on another machine and under another path.
    # Optional: `keep_vocabularies(folder)`, writes what ids stand for: files that a resume compares byte for byte.


def no_report(text: str, done: int, total: int) -> None:
    """A `Report` that says nothing, for use outside a training run."""


def check_limits(**values: tuple[float | None, float, float | None]) -> None:
    """Check `key=(value, least, most)` of the keys under `data`; None as value is not checked, as limit is none.

    Raises:
        ValueError: naming the key, the value and the limit.
    """
    for key, (value, least, most) in values.items():
        if value is not None and not (value >= least and (most is None or value <= most)):
            limit = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"data.{key}={value}: must be {limit}")


def fingerprint_of(*pieces: bytes) -> str:
    """Returns a short digest of all pieces, with their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def split_evenly(count: int, slices: int) -> list[slice]:
    """Divides `range(count)` into consecutive slices whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(count, slices)
    starts = [number * size + min(number, larger) for number in range(slices + 1)]
    return [slice(first, last) for first, last in pairwise(starts)]


def slices_of_replica(count: int, M: int, replica: int, replicas: int, key: str) -> list[slice]:
    """Returns the M slices of a mini-batch of `count` examples that one replica trains on, of D·M in all.

    Raises:
        ConfigurationError: fewer examples than D·M; `key` names the setting that makes the mini-batch larger.
    """
    if count < M * replicas:
        raise ConfigurationError(
            f"a mini-batch of {count} examples cannot be divided into {M * replicas} micro-batches "
            f"(pipeline.M={M} × {replicas} replicas): raise {key} or lower pipeline.M"
        )
    return split_evenly(count, M * replicas)[replica * M : (replica + 1) * M]


def permutation(count: int, *key: object) -> npt.NDArray[np.int64]:
    """A shuffled `range(count)` that is a pure function of `key`, on every platform and numpy version.

    Sorting raw Philox words uses only what numpy promises never to change; `Generator.permutation` is not promised.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(words, kind="stable")


def read_ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """The same items in the same order, made up to `depth` early by one background thread."""
    end = object()
    with_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
    waiting: deque[Future[Any]] = deque()
    try:
        while True:
            while len(waiting) <= depth:
                waiting.append(with_thread.submit(next, items, end))
            item = waiting.popleft().result()
            if item is end:
                return
            yield item
    finally:
        with_thread.shutdown(wait=True, cancel_futures=True)
