"""The first worker's side of the data: takes mini-batches from the source, weighs them, counts waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ..data.source import Batch
from ..micro_batch import MicroBatch


class Feed:
    """One stream of mini-batches, one ahead of the training step that uses them.

    Args:
        batches: of the source.
        weigh: the task's weight of a part's targets.
    """

    def __init__(self, batches: Iterator[Batch], weigh: Callable[[Any], float]) -> None:
        self._batches, self._weigh = batches, weigh
        self.micro_batches: list[MicroBatch] = []
        self.weights: list[float] = []
        self.position: Any = None
        self.seconds_waited = 0.0

    def advance(self) -> bool:
        """Makes the next mini-batch the current one; False, and no micro_batches, when the data has ended."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        self.seconds_waited = time.perf_counter() - began
        if batch is None:
            self.micro_batches, self.weights = [], []
            return False
        self.micro_batches, self.position = list(batch.micro_batches), batch.position
        self.weights = [self._weigh(targets) for _, targets in self.micro_batches]
        return True
