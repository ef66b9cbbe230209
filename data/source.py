"""Defines the interface of a data source, and the helpers that the sources share.

A source is any class with the three methods of `Source`; nothing has to be inherited. Only the first worker of a
replica reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..disk import writing
from ..errors import ConfigurationError
from ..micro_batch import MicroBatch

Report = Callable[[str, int, int], None]
"""`report(text, done, total)`: what is being prepared, and how much of it is done."""

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Holds one mini-batch, divided into its micro-batches.

    Attributes:
        micro_batches: `(inputs, targets)` of each: two tuples of CPU tensors whose first dimension counts examples.
            A source that pads may give micro-batches of equal cost instead of equal size.
        position: a JSON value; `source.train(position, …)` goes on after this batch.
    """

    micro_batches: list[MicroBatch]
    position: Any


class Source(Protocol):
    """Yields mini-batches. `data._target_` names a class with these methods."""

    def prepare(self, report: Report) -> None:
        """Builds or opens what the batches need; called once, before the first batch."""

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches from just after `position` (None: from the start), without end; an end would end the run.

        With D replicas a mini-batch has D·M micro-batches, and replica r reads those numbered r·M … (r+1)·M − 1. The
        same seed and position give the same batches.
        """

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields the whole evaluation set once; the last batches may have fewer micro-batches."""

    # Optional methods and attributes:
    # `typical_micro_batch(micro_batches, longest) -> (micro_batch, examples)`, for plans made without data: the largest
    #     micro-batch, on the meta device, of a typical mini-batch of `examples` examples that is divided into
    #     `micro_batches` (of all replicas). With `longest`, sequences are as long as the source's limits allow.
    # `epoch(position) -> float`, how often the data was read up to `position`; `trainer.epochs` needs it.
    # `evaluation_share(M, replica, replicas)`, the mini-batches number replica, replica + replicas, … of `evaluation`;
    #     where reading is slow, so that not every replica reads everything.
    # `prepared_defects`, counts of what `prepare` found broken or left out; equal on every replica. For summary.json.
    # `defects`, a dict of counts of what was found broken while reading, on this replica. For summary.json, added up.
    # `fingerprint() -> str`, of the prepared training data. A run is not resumed with data of another fingerprint.
    #     Equal data have an equal one on every machine and under every path.
    # `keep_vocabularies(folder)`, writes what ids stand for, as files that a resume compares byte for byte.


def no_report(text: str, done: int, total: int) -> None:
    """Discards the report; for use outside a training run."""


def cache_folder(cache_dir: str | None) -> Path:
    """Returns `cache_dir`, or `$GPIPE_CACHE`, or `~/.cache/gpipe`."""
    return Path(cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()


def writing_cache(cache: Path) -> AbstractContextManager[None]:
    """Returns a context in which an OSError of the cache becomes a `DiskError`: its file, the reason, what to do."""
    return writing(cache, "set data.cache_dir or GPIPE_CACHE to a folder with room")


def check_limits(**values: tuple[float | None, float, float | None]) -> None:
    """Checks `key=(value, least, most)` of keys under `data`; a value or limit of None is not checked.

    Raises:
        ValueError: a value is outside its limits; the message names the key.
    """
    for key, (value, least, most) in values.items():
        if value is not None and not (value >= least and (most is None or value <= most)):
            limit = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"data.{key}={value}: must be {limit}")


def fingerprint_of(*pieces: bytes) -> str:
    """Returns a short digest of all pieces and their lengths."""
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


def random_words(count: int, *key: object) -> npt.NDArray[np.uint64]:
    """Returns `count` random 64-bit words that depend on `key` alone, on every platform and numpy version."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.asarray(np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count), np.uint64)


def permutation(count: int, *key: object) -> npt.NDArray[np.int64]:
    """Returns a shuffled `range(count)` that depends on `key` alone, on every platform and numpy version.

    It sorts raw Philox words: numpy promises never to change these, but not the results of `Generator.permutation`.
    """
    return np.argsort(random_words(count, *key), kind="stable")


def read_ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yields the same items in the same order; a background thread makes up to `depth` of them early."""
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
