"""Reads a source's mini-batches, checks their numbers of micro-batches, and reads one ahead of the training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..config import TrainerConfig
from ..data.source import Batch, Source, name_of
from ..distributed.batch_plan import BatchPlan
from ..distributed.exchange import Exchange
from ..distributed.pipeline import Pipeline
from ..errors import ConfigurationError
from ..micro_batch import MicroBatch
from .upload import Uploader

# -- of a source, checked ----------------------------------------------------------------------------------------------


def training_batches(source: Source, position: Any, M: int, replica: int, replicas: int) -> Generator[Batch]:
    """Returns the batches of `source.train`.

    Raises:
        ConfigurationError: while they are read: a mini-batch has not M micro-batches.
    """
    return _checked(M, source.train(position, M, replica, replicas), source, "train")


def first_batch(source: Source, M: int, replicas: int) -> Batch:
    """Returns the first training batch of replica 0.

    Raises:
        ConfigurationError: there is none, or it has not M micro-batches.
    """
    with closing(training_batches(source, None, M, 0, replicas)) as batches:
        for batch in batches:
            return batch
    raise ConfigurationError(f"the data source {name_of(source)} gave no mini-batch: its train() must not end")


def evaluation_batches(source: Source, M: int, replica: int, replicas: int) -> Iterator[Batch]:
    """Returns this replica's mini-batches of the evaluation set; the last ones may have fewer micro-batches.

    Raises:
        ConfigurationError: while they are read: a mini-batch has more than M micro-batches.
    """
    return _checked(M, source.evaluation_share(M, replica, replicas), source, "evaluation")


def _checked(M: int, batches: Iterator[Batch], source: Source, method: str) -> Generator[Batch]:
    for batch in batches:
        given, right = len(batch.micro_batches), "exactly" if method == "train" else "at most"
        if given > M or (given < M and right == "exactly"):
            raise ConfigurationError(
                f"the data source {name_of(source)} gave {given} micro-batches in a mini-batch, {M} were asked for: "
                f"the batches of its {method}() must have {right} M micro-batches"
            )
        yield batch


# -- on the first worker of a replica ----------------------------------------------------------------------------------


class BatchReader:
    """Reads one stream of mini-batches and announces each in the exchange.

    Attributes:
        micro_batches: of the current mini-batch; none when the data has ended.
        position: of the current mini-batch; None before the first.
        seconds_waited: for the current mini-batch.

    Args:
        uploader: copies each mini-batch to the device before it is taken; None: it stays in the host's memory.
    """

    def __init__(self, batches: Iterator[Batch], pipeline: Pipeline, uploader: Uploader | None = None) -> None:
        self._batches, self._pipeline, self._uploader = batches, pipeline, uploader
        self.micro_batches: list[MicroBatch] = []
        self.position: Any = None
        self.seconds_waited = 0.0

    def advance(self, exchange: Exchange) -> None:
        """Reads the next mini-batch and writes its plan."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        self.seconds_waited = time.perf_counter() - began
        self.micro_batches = [] if batch is None else list(batch.micro_batches)
        if batch is not None:
            self.position = batch.position
        self._pipeline.write_plan(exchange, self.micro_batches)
        if self._uploader is not None:
            self.micro_batches = self._uploader.begin(self.micro_batches)

    def take(self) -> list[MicroBatch]:
        """Returns the current mini-batch, ready for use on the device."""
        if self._uploader is not None:
            self._uploader.take(self.micro_batches)
        return self.micro_batches


# -- on every worker ---------------------------------------------------------------------------------------------------

STOP_REASONS = ("", "time limit", "epochs")  # rank 0 sends the index; a worker that was asked to stop adds their number


@dataclass
class TrainingBatches:
    """Announces each training batch one step ahead, and the end of the run; every worker has one.

    Attributes:
        source: on the first worker of each replica, None elsewhere.
        position: of the last mini-batch trained on; None at the beginning.
        stop_requested: whether this worker was asked to stop.
        seconds_waited: for the mini-batch trained on.
    """

    settings: TrainerConfig
    pipeline: Pipeline
    source: Source | None
    position: Any
    stop_requested: Callable[[], bool]
    seconds_waited: float = 0.0
    _reader: BatchReader | None = None
    _began: float = field(default_factory=time.monotonic)

    def open(self) -> None:
        """Begins to read behind `position`."""
        if self.source is not None:
            world, M = self.pipeline.world, self.pipeline.codec.M
            batches = training_batches(self.source, self.position, M, world.replica, world.replicas)
            self._reader = BatchReader(batches, self.pipeline, Uploader(world.device))

    def take(self) -> list[MicroBatch] | None:
        """Returns the announced mini-batch, to be trained on now; None on workers that do not read data."""
        if self._reader is None:
            return None
        self.position, self.seconds_waited = self._reader.position, self._reader.seconds_waited
        return self._reader.take()

    def announce(self, exchange: Exchange) -> None:
        """Writes the plan of the next mini-batch, and whether the run ends before it."""
        if self._reader is not None:
            with self.pipeline.where.doing("reading the next mini-batch"):
                self._reader.advance(exchange)
        own = STOP_REASONS.index(self._limit_reached()) if self.pipeline.world.rank == 0 else 0
        exchange.own["stop"][0] = own + len(STOP_REASONS) * self.stop_requested()

    def _limit_reached(self) -> str:
        limit = self.settings.seconds
        if limit is not None and time.monotonic() - self._began >= limit:
            return "time limit"
        return "epochs" if (self._share_of_epochs() or 0.0) >= 1 else ""

    def read_plan(self, exchange: Exchange) -> tuple[BatchPlan, str]:
        """Returns the plan of the next mini-batch, and why the run ends before it; "" where it does not."""
        plan, stop = self.pipeline.codec.read(exchange, "train"), int(exchange.total["stop"].item())
        if stop >= len(STOP_REASONS):
            return plan, "request"
        return plan, STOP_REASONS[stop] or ("end of data" if plan.ended else "")

    def share_done(self, step: int) -> float | None:
        """Returns the share of the run before ``step`` by the limit that comes first; None where none is known here."""
        settings, shares = self.settings, [self._share_of_epochs()]
        if settings.steps is not None:
            shares.append(step / settings.steps)
        if settings.seconds is not None:
            shares.append((time.monotonic() - self._began) / settings.seconds)
        return max((share for share in shares if share is not None), default=None)

    def _share_of_epochs(self) -> float | None:
        epochs, source = self.settings.epochs, self.source
        if epochs is None or source is None or self.position is None:
            return None
        return source.epoch(self.position) / epochs

    def epochs_of_languages(self) -> dict[str, float]:
        """Returns how often the pairs of each language were read; empty where the source does not count them."""
        return {} if self.source is None else dict(self.source.epochs(self.position))
