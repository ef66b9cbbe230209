"""Opens the data source on the workers that read it, and reads its mini-batches, one ahead of the training step."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch

from ..checkpoint.files import require_writable_as_json
from ..config import Settings, TrainerConfig
from ..data.source import Batch, Report, Source, name_of, no_report
from ..distributed.pipeline import WorkerPipeline
from ..distributed.step_message import refuse_unlike_lengths
from ..distributed.world import VALUES, Tree, World
from ..errors import ConfigurationError, PlainError
from ..factory.build import build_source
from ..launch.context import Context
from ..metrics.journal import Notices
from ..micro_batch import MicroBatch, Tensors
from ..typed_section import shown

PREPARATION_TIMEOUT = timedelta(days=365)

# -- opening the source ------------------------------------------------------------------------------------------------


def open_source(context: Context, settings: Settings, world: World, journal: Notices) -> Source | None:
    """Makes and prepares the data source; every worker calls it at the same time.

    Its warnings are shown on the console. While it prepares, only those of rank 0 are, because the other readers find
    the same; later, those of every reader.

    Returns:
        The source on the first worker of each replica, None elsewhere.

    Raises:
        ConfigurationError: it cannot be made, or does not count the epochs that `trainer.epochs` limits.
        PlainError: the run was asked to stop.
    """
    source = build_source(settings.data, settings.seed, settings.task) if world.reads_data else None

    def report(text: str, done: int, total: int) -> None:
        if context.stop_requested():
            raise PlainError("ended while the data were prepared: the next run begins with them anew")
        journal.preparation(text, done, total)

    if source is not None and world.rank == 0:
        forward_warnings(source, context.emit)
    prepare_in_turn(source, world, report)
    if source is not None:
        forward_warnings(source, context.emit)
        if settings.trainer.epochs is not None:
            source.epoch(None)  # refused by a source that does not count them
    return source


def prepare_in_turn(source: Source | None, world: World, report: Report) -> None:
    """Prepares the source on rank 0, then on the other workers that read data; every worker calls it.

    The others find it prepared, unless their machine shares no disk with rank 0's.

    Args:
        source: None on workers that do not read data.
        report: receives rank 0's progress.
    """
    if source is not None and world.rank == 0:
        source.prepare(report)
    wait_for_all(world)
    if source is not None and world.rank != 0:
        source.prepare(no_report)
    wait_for_all(world)


def wait_for_all(world: World) -> None:
    """Returns when every worker has called it, even hours later: a large corpus takes longer than a message may.

    Uses point-to-point messages, because gloo's collectives take only the group's timeout (`GROUP_TIMEOUT_SECONDS`).
    A worker that dies is still noticed at once, by its closed connections.
    """
    Tree(world.all_ranks, VALUES).add_up(torch.zeros(1), PREPARATION_TIMEOUT)


class _ToConsole(logging.Handler):
    """Emits logged warnings as events, which the console shows."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        """Emits a logged message as a warning."""
        self._emit({"kind": "warning", "text": record.getMessage()})
        record.shown = True  # the console may listen in this process, too (launch.inline)


def forward_warnings(source: Source, emit: Callable[[dict[str, Any]], None]) -> None:
    """Shows the warnings that the source's package logs, from any thread, on the console."""
    package = type(source).__module__.rpartition(".")[0] or type(source).__module__
    logger = logging.getLogger(package)
    # Those of an earlier run in this process go.
    logger.handlers = [*(one for one in logger.handlers if not isinstance(one, _ToConsole)), _ToConsole(emit)]


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
    """Yields the batches, after a check of their numbers of micro-batches and of examples.

    Args:
        method: the source's method that gave them: "train", with M micro-batches each, or "evaluation", with M at most.
    """
    for batch in batches:
        given, right = len(batch.micro_batches), "exactly" if method == "train" else "at most"
        if given > M or (given < M and right == "exactly"):
            raise ConfigurationError(
                f"the data source {name_of(source)} gave {given} micro-batches in a mini-batch, {M} were asked for: "
                f"the batches of its {method}() must have {right} M micro-batches"
            )
        for inputs, targets in batch.micro_batches:
            refuse_unlike_lengths(inputs, targets)
        yield batch


def on_device(micro_batches: Sequence[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Returns the micro-batches on the device; the host does not wait for a GPU that still computes."""
    if device.type == "cpu":
        return list(micro_batches)

    def copied(tensors: Tensors) -> Tensors:  # memory of the host that is not pinned would make the host wait
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)

    return [(copied(inputs), copied(targets)) for inputs, targets in micro_batches]


# -- on every worker ---------------------------------------------------------------------------------------------------


@dataclass
class TrainingBatches:
    """Offers each training batch one step ahead, and the end of the run; every worker has one.

    Attributes:
        source: the data source, on the first worker of each replica; None elsewhere.
        position: position in the data of the last mini-batch trained on; None at the beginning.
        stop_requested: returns whether this worker was asked to stop.
        failure: exception of the source in place of the next mini-batch; other workers see the end of the data.
        seconds_waited: seconds for which this worker waited for the mini-batch trained on.
    """

    settings: TrainerConfig
    pipeline: WorkerPipeline
    source: Source | None
    position: Any
    stop_requested: Callable[[], bool]
    failure: Exception | SystemExit | None = None
    seconds_waited: float = 0.0
    _batches: Iterator[Batch] | None = None
    _offered: list[MicroBatch] = field(default_factory=list)
    _next: tuple[Any, float] = None, 0.0  # position and seconds of the mini-batch offered
    _taken: bool = False  # whether any mini-batch was taken
    _began: float = field(default_factory=time.monotonic)

    def open(self) -> None:
        """Begins to read mini-batches behind `position`, on workers that read data."""
        if self.source is not None:
            world, M = self.pipeline.world, self.pipeline.M
            with self._continuing():
                self._batches = training_batches(self.source, self.position, M, world.replica, world.replicas)

    def take(self) -> list[MicroBatch] | None:
        """Returns the mini-batch offered before, to be trained on now; None on workers that do not read data."""
        if self._batches is None:
            return None
        self.position, self.seconds_waited = self._next
        if not self._taken:
            require_writable_as_json("the position of a mini-batch", self.position)
        self._taken = True
        return self._offered

    def offer(self) -> None:
        """Reads the next mini-batch, and writes its plan and whether the run ends before it into the message."""
        if self._batches is not None:
            with self.pipeline.where.doing("reading the next mini-batch"):
                try:
                    self._read(self._batches)
                except (Exception, SystemExit) as error:
                    if not self._taken:
                        raise
                    self.failure = error  # raised when the step that has ended is recorded and saved
                    self.pipeline.write_plan([])
        message, shares = self.pipeline.message, self._shares_done() if self.pipeline.world.rank == 0 else {}
        if reached := next((limit for limit, share in shares.items() if share >= 1), ""):
            message.write_flag(reached, True)
        message.write_flag("request", self.stop_requested())

    def _read(self, batches: Iterator[Batch]) -> None:
        """Reads the next mini-batch, writes its plan, and begins to copy it to the device."""
        began = time.perf_counter()
        with self._continuing():
            batch = next(batches, None)
        if batch is not None:
            self._next = batch.position, time.perf_counter() - began
        micro_batches = [] if batch is None else list(batch.micro_batches)
        self.pipeline.write_plan(micro_batches)
        self._offered = on_device(micro_batches, self.pipeline.world.device)

    @contextmanager
    def _continuing(self) -> Iterator[None]:
        """Turns an error of the source before the first step into one about the checkpoint's `data_position`."""
        try:
            yield
        except (LookupError, TypeError) as error:
            if self.position is None or self._taken:
                raise
            raise ConfigurationError(
                f"the checkpoint's data_position, {shown(self.position)}, is none that the data source "
                f"{name_of(cast(Source, self.source))} can continue from: {type(error).__name__}: {error}"
            ) from error

    def share_done(self, step: int) -> float | None:
        """Returns the share of the run that is done before ``step``, by the limit that comes first; None: no limit."""
        steps = self.settings.steps
        return max([*self._shares_done().values(), *([] if steps is None else [step / steps])], default=None)

    def _shares_done(self) -> dict[str, float]:
        """Returns the used share of each limit but the number of steps, as far as this worker knows it."""
        seconds, epochs, found = self.settings.seconds, self.settings.epochs, dict[str, float]()
        if seconds is not None:
            found["time limit"] = (time.monotonic() - self._began) / seconds
        if epochs is not None and self.source is not None and self.position is not None:
            found["epochs"] = self.source.epoch(self.position) / epochs
        return found
