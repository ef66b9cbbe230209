"""Makes a source of two PyTorch data sets."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ..cpu import seeded, usable_cores
from ..errors import ConfigurationError
from ..micro_batch import MicroBatch
from .source import Batch, Source, evaluation_parts, permutation, read_ahead, slices_of_replica

MOST_WORKERS = 16  # chosen by "auto": more would only fill the memory with mini-batches

Key = tuple[int, int]
"""(epoch, index): by both, loader processes seed the augmentation of an example."""


class DatasetSource(Source):
    """Yields mini-batches of two map-style data sets of `(input, target)`.

    Input and target are each something that `default_collate` can stack, or a tuple of such; a micro-batch holds the
    stacked tuples. The order of an epoch depends on (seed, epoch) alone. While an example is read, the generators of
    `random`, numpy and torch are seeded by (seed, epoch, index). So random augmentation does not depend on where a run
    resumes or on the number of loader processes.

    Args:
        train: examples to train on.
        evaluation: examples of an evaluation, read in their own order with the seeds of epoch 0; may be empty.
        batch_size: examples of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last examples if they do not fill a mini-batch.
        collate: makes `(inputs, targets)`, two tuples of tensors, of a list of examples; None: `stack_examples`.
        workers: loader processes of a replica, which read ahead; 0 reads in the training process, just before the batch
            is needed; "auto": as many as the replica's share of the machine's cores, at most 16.
        seed: decides the order and the augmentation.

    Raises:
        ConfigurationError: a value is outside its limits, or there are fewer examples than in a mini-batch.
    """

    def __init__(
        self,
        train: Dataset[Any],
        evaluation: Dataset[Any],
        batch_size: int,
        drop_last: bool = True,
        collate: Callable[[list[Any]], MicroBatch] | None = None,
        workers: int | Literal["auto"] = 0,
        seed: int = 0,
    ) -> None:
        self._train_set, self._evaluation_set, self._count = train, evaluation, len(cast(Any, train))
        if batch_size < 1 or self._count < (batch_size if drop_last else 1):
            raise ConfigurationError(
                f"data.batch_size={batch_size}, but there are {self._count} training examples: "
                "lower data.batch_size, or set data.drop_last=false"
            )
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._collate, self._workers = collate or stack_examples, workers

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"epoch": e, "batch": b}`, the next one to read."""
        for size in (self._batch_size, self.fewest_examples(1)):
            slices_of_replica(size, M, replica, replicas, "data.batch_size (or set data.drop_last)")
        start = position or {"epoch": 0, "batch": 0}
        keys, workers = self._keys(start["epoch"], start["batch"], M, replica, replicas), self._loaders(replicas)
        loaded = self._load(self._train_set, keys, workers)
        numbers = count(start["epoch"] * self._batches + start["batch"] + 1)
        positions = (divmod(number, self._batches) for number in numbers)
        batches = (Batch(list(islice(loaded, M)), {"epoch": epoch, "batch": batch}) for epoch, batch in positions)
        return read_ahead(batches) if workers else batches

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Returns all examples once, in order; the last batch may have fewer micro-batches."""
        return self.evaluation_share(M, 0, 1)

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Returns the mini-batches number replica, replica + replicas, … of `evaluation`; no example is read twice.

        Loader processes start here, in the calling thread, and not at the first batch: one forked by a thread that
        reads ahead fails when it ends ("cannot join current thread"), which would look like a crash.
        """
        every = evaluation_parts(len(cast(Any, self._evaluation_set)), self._batch_size, M)
        mine, workers = list(islice(every, replica, None, replicas)), self._loaders(replicas)
        keys = [[(0, index) for index in part] for parts in mine for part in parts]
        loaded = self._load(self._evaluation_set, iter(keys), workers)
        batches = (Batch(list(islice(loaded, len(parts))), parts[0].start) for parts in mine)
        return read_ahead(batches) if workers else batches

    def fewest_examples(self, micro_batches: int) -> int:
        """Returns the examples of an epoch's smallest micro-batch, which is in its last mini-batch."""
        remainder = 0 if self._drop_last else self._count % self._batch_size
        return (remainder or self._batch_size) // micro_batches

    def epoch(self, position: Any) -> float:
        """Returns how often all examples were read up to `position`."""
        start = position or {"epoch": 0, "batch": 0}
        return float(start["epoch"] + start["batch"] / self._batches)

    @property
    def _batches(self) -> int:
        """Returns the number of mini-batches of an epoch."""
        return self._count // self._batch_size + bool(not self._drop_last and self._count % self._batch_size)

    def _keys(self, epoch: int, batch: int, M: int, replica: int, replicas: int) -> Iterator[list[Key]]:
        """Yields the keys of each micro-batch of this replica without end, from mini-batch `batch` of `epoch` on."""
        for current in count(epoch):
            order = permutation(self._count, self._seed, current).tolist()
            stop = self._count - self._batch_size + 1 if self._drop_last else self._count
            for first in range(batch * self._batch_size, stop, self._batch_size):
                indices = order[first : first + self._batch_size]
                for mine in slices_of_replica(len(indices), M, replica, replicas, "data.batch_size"):
                    yield [(current, index) for index in indices[mine]]
            batch = 0

    def read(self, examples: Dataset[Any], keys: Sequence[Key]) -> MicroBatch:
        """Returns a micro-batch of some examples, read in this process."""
        seeded = _Seeded(examples, self._seed)
        return self._collate([seeded[key] for key in keys])

    def _loaders(self, replicas: int) -> int:
        """Returns the loader processes of a replica; "auto" divides the cores among those on this machine."""
        if self._workers != "auto":
            return self._workers
        everywhere, here = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        replicas_here = -(-replicas * min(here, everywhere) // everywhere)
        return max(1, min(MOST_WORKERS, usable_cores() // replicas_here))

    def _load(self, examples: Dataset[Any], keys: Iterator[list[Key]], workers: int) -> Iterator[MicroBatch]:
        """Yields a micro-batch for each list of keys, read in loader processes, or in this one without any.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch: so callers read ahead.
        Without them, examples are read in this process, where only the training thread may seed the generators.
        """
        if not workers:
            return (self.read(examples, its_keys) for its_keys in keys)
        # Loader processes alone read examples: a file opened before a fork is not safe to read after it.
        how: dict[str, Any] = {"batch_sampler": keys, "collate_fn": self._collate, "num_workers": workers}
        seeded = _Seeded(examples, self._seed)
        return iter(DataLoader(seeded, **how, generator=torch.Generator()))  # its default is the one of dropout


class _Seeded(Dataset[Any]):
    """Reads an example by (epoch, index), by which it seeds the generators.

    The key holds the epoch, because loader processes that go on would not see one that is set from outside.
    """

    def __init__(self, examples: Dataset[Any], seed: int) -> None:
        self._examples, self._seed = examples, seed

    def __getitem__(self, key: Key) -> Any:
        with seeded(int(np.random.SeedSequence((self._seed, *key)).generate_state(1, np.uint32)[0])):
            return self._examples[key[1]]


def stack_examples(examples: list[Any]) -> MicroBatch:
    """Returns `(inputs, targets)` of a list of `(input, target)`, both as tuples of stacked tensors.

    Raises:
        ConfigurationError: an example is not a pair.
    """
    if not (isinstance(examples[0], (tuple, list)) and len(examples[0]) == 2):
        raise ConfigurationError(
            f"an example of data.train or data.evaluation is not (input, target) but {type(examples[0]).__name__}: "
            "return a pair, or give data.collate"
        )
    stacked = [default_collate([example[side] for example in examples]) for side in (0, 1)]
    inputs, targets = (tuple(side) if isinstance(side, (tuple, list)) else (side,) for side in stacked)
    return inputs, targets
