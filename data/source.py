"""Defines the interface of a data source, and the helpers that the sources share."""

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

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


class HeldOutSample(NamedTuple):
    """Holds a sentence of "dev" or "test"; `source_ids` ends with the end token, as the model reads it."""

    split: str
    language: str
    source: str
    reference: str
    source_ids: Sequence[int] = ()


class Source(ABC):
    """Yields mini-batches; `data._target_` names a subclass. Only the first worker of each replica reads it.

    Attributes:
        pad_id, bos_id, eos_id: token ids, for generation.
        sizes: training pairs of each language, for averages of scores over languages.
        evaluation_split: name of the held-out sentences that are translated, "dev" or "test".
        evaluation_per_language: number of them of each language; None: all.
        prepared_defects: counts of what `prepare` found broken or left out, for summary.json; equal on every replica.
    """

    pad_id: int = 0
    bos_id: int = 0
    eos_id: int = 0
    sizes: Mapping[str, int] = MappingProxyType({})
    evaluation_split: str = "dev"
    evaluation_per_language: int | None = None
    prepared_defects: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end, from just after `position` (None: from the start).

        With D replicas a mini-batch has D·M micro-batches, and replica r reads those numbered r·M … (r+1)·M − 1. The
        same seed and position give the same batches.
        """

    @abstractmethod
    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields the whole evaluation set once; the last batches may have fewer micro-batches."""

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the mini-batches number replica, replica + replicas, … of `evaluation`."""
        return islice(self.evaluation(M), replica, None, replicas)

    def prepare(self, report: Report) -> None:  # noqa: B027 # most need nothing
        """Builds or opens the files that the batches need; called once, before the first batch."""

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch and the number of examples of its mini-batch, by which plans are made.

        This one prepares the data and reads a mini-batch. Sources that know their shapes override it.

        Args:
            micro_batches: number of micro-batches of the mini-batch, in all replicas.
            longest: True for sequences as long as the source's limits allow, where these are known.

        Raises:
            ConfigurationError: there is no mini-batch.
        """
        self.prepare(no_report)
        batch = next(self.train(None, micro_batches, 0, 1), None)
        if batch is None:
            raise ConfigurationError(f"{name_of(self)} yields no mini-batch: its train() must not end")
        return batch.micro_batches[0], sum(len(inputs[0]) for inputs, _ in batch.micro_batches)

    @property
    def knows_typical_shapes(self) -> bool:
        """Returns whether `typical_micro_batch` is the source's own, which needs no data."""
        return type(self).typical_micro_batch is not Source.typical_micro_batch

    def fewest_examples(self, micro_batches: int) -> int | None:
        """Returns the examples of an epoch's smallest micro-batch; None: as in the first mini-batch.

        Args:
            micro_batches: number of micro-batches of a mini-batch, in all replicas.
        """
        return None

    def epoch(self, position: Any) -> float:
        """Returns how often the data were read up to `position`; for `trainer.epochs`."""
        raise self._lacks("epoch(position), by which trainer.epochs counts: use trainer.steps")

    def fingerprint(self) -> str | None:
        """Returns a digest of the prepared training data, equal for equal data on every machine and under every path.

        A run is not resumed with data of another digest. None: data are not compared.
        """
        return None

    def keep_vocabularies(self, folder: Path) -> None:  # noqa: B027
        """Writes the vocabularies into `folder`, as files that a resume compares byte for byte."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, as the model reads them."""
        raise self._lacks("encode(texts), which gives their token ids")

    def decode(self, ids: Sequence[int], after: int = 0) -> str:
        """Returns the text of token ids, up to the first end token at place `after` or later.

        `after` is the length of a prompt, if that has end tokens, and else 0.
        """
        raise self._lacks("decode(ids), which gives their text")

    def held_out(self, split: str, per_language: int | None) -> list[HeldOutSample]:
        """Returns held-out sentences of "dev" or "test", `per_language` of each language (None: all)."""
        raise self._lacks("held_out(split, per_language), which gives sentences to translate")

    def _lacks(self, method: str) -> ConfigurationError:
        """Returns the error that a source has no such method, which something needs."""
        return ConfigurationError(f"data._target_={name_of(self)} has no method {method}")


def name_of(source: object) -> str:
    """Returns the full name of an object's class."""
    return f"{type(source).__module__}.{type(source).__qualname__}"


def no_report(text: str, done: int, total: int) -> None:
    """Discards the report; for use outside a training run."""


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


def evaluation_parts(count: int, batch_size: int, M: int) -> Iterator[list[range]]:
    """Yields for each mini-batch of an evaluation the examples (of `count`) in each of its at most M micro-batches."""
    for first in range(0, count, batch_size):
        batch = range(count)[first : first + batch_size]
        yield [batch[part] for part in split_evenly(len(batch), min(M, len(batch)))]


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
    """Returns a shuffled `range(count)` that depends on `key` alone, on every platform and numpy version.

    It sorts raw Philox words: numpy promises never to change these, but not the results of `Generator.permutation`.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(words, kind="stable")


def read_ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yields the same items in the same order. A background thread makes up to `depth` of them early."""
    end, thread = object(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
    waiting: deque[Future[Any]] = deque(thread.submit(next, items, end) for _ in range(depth))
    try:
        while True:
            waiting.append(thread.submit(next, items, end))
            if (item := waiting.popleft().result()) is end:
                return
            yield item
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
