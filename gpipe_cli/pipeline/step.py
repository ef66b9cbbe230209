"""Defines the data about a training step: its plan, the record and times of one worker, the result that all know."""

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..micro_batch import MicroBatch
from ..position import Position
from ..schedule.instruction import COMPUTE, Instruction, Op
from ..schedule.simulate import Span


@dataclass(frozen=True)
class StepPlan:
    """Describes one mini-batch to a worker.

    Attributes:
        signatures: shapes and types of each micro-batch of this replica; empty if it has none.
        total_weight: weight of the whole mini-batch, over all replicas.
        total_micro_batches: number of micro-batches of all replicas; 0: the data of all has ended.
        examples: number of examples of the whole mini-batch.
        empty: numbers of this replica's micro-batches of weight 0, whose loss does not count, whatever it is.
        stop: reason for which training ends before this mini-batch; "" if it goes on. It ends when the data of any
            replica has ended, because a mini-batch needs all replicas.
        step: number of the training step, from 0, which seeds the noise.
        steps: number of all steps of the run; 0: not known.
        loss_scale: factor by which the loss, and so all gradients, are multiplied.
        micro_batches: inputs and targets, on the worker of cell 0; None elsewhere.
    """

    signatures: tuple[tuple[object, ...], ...]
    total_weight: float
    total_micro_batches: int = 0
    examples: int = 0
    empty: frozenset[int] = frozenset()
    stop: str = ""
    step: int = 0
    steps: int = 0
    loss_scale: float = 1.0
    micro_batches: Sequence[MicroBatch] | None = field(default=None, repr=False)

    @property
    def scale(self) -> float:
        """Returns the factor of every loss before its backward."""
        return self.loss_scale / self.total_weight if self.total_weight else 0.0


@dataclass
class StepRecord:
    """Holds what one worker has measured in a training step.

    Attributes:
        losses: unscaled sums by (layer, micro-batch): auxiliary losses under the index of their layer, the task's under
            `TASK`. One number each, so that adding them up gives the same bits for every K.
        statistics: sums of the task's statistics, on the last cell's worker.
    """

    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    statistics: Tensor | None = None


@dataclass
class StepResult:
    """Holds what all workers know of a training step after their exchange.

    Attributes:
        plan: the plan by which the step was run.
        loss: loss of the mini-batch, per unit of weight.
        losses: unscaled sums by replica, then micro-batch.
        gradient_norm: norm of the whole gradient, before clipping.
        statistics: sums of the task's statistics over the mini-batch.
        bubble: share of the workers' time that is not computing, from when the first worker begins the step until the
            last one ends it. What rank 0 does between the steps, such as drawing pictures, lies outside.
        cells: seconds per cell (mean over replicas) for each of `KINDS_OF_TIME`, and "waiting", for both neighbours.
        numbers: a number for each rank, by the names of `WORKER_NUMBERS`. "late": seconds from the exchange before the
            step until the rank begins the step. "span": seconds from there to the end of its last instruction. "busy":
            the seconds of these in which it computes. "waited_for_data": seconds for which the first worker waited for
            this mini-batch. "memory_bytes": peak memory. And seconds of each of `PHASES` between the step before and
            this one, because those of this step end after the exchange.
        lr: learning rate of the update.
        seconds: seconds of the whole step on this worker, its update included; known when it has ended.
        not_finite: the first place with a value that is not finite, in words; None where all are finite.
    """

    plan: StepPlan
    loss: float
    losses: list[list[float]]
    gradient_norm: float
    statistics: list[float]
    bubble: float
    cells: list[dict[str, float]]
    numbers: Mapping[str, list[float]] = field(repr=False)
    lr: float = 0.0
    seconds: float = 0.0
    not_finite: str | None = None

    @property
    def finite(self) -> bool:
        """Returns whether loss and gradient norm are finite, so that the update is applied."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def overflowed(self) -> bool:
        """Returns whether a smaller loss scale may help: the loss is finite, and its scaled gradients are not."""
        return self.plan.loss_scale > 1 and math.isfinite(self.loss) and not math.isfinite(self.gradient_norm)

    @property
    def workers(self) -> list[dict[str, float]]:
        """Returns for each rank its `WORKER_NUMBERS` by name."""
        return [dict(zip(self.numbers, row, strict=True)) for row in zip(*self.numbers.values(), strict=True)]


# -- times of instructions, by the CPU's clock or by CUDA events -------------------------------------------------------

Mark: TypeAlias = Any  # a moment: seconds of the machine's monotonic clock, or a torch.Event

# The kind of time of each operation of a cell. A cell waits for activations from the cell before it and for gradients
# from the cell behind it.
TIME_OF = {op: op.name.lower() for op in COMPUTE}
TIME_OF |= {Op.RECEIVE_ACTIVATION: "waiting_for_activation", Op.RECEIVE_GRADIENT: "waiting_for_gradient"}
TIME_OF |= dict.fromkeys((Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.BRING, Op.TAKE_AWAY), "sending")
KINDS_OF_TIME = tuple(dict.fromkeys(TIME_OF.values()))  # seconds per cell
HOST_PHASES = {"data": "reading the next mini-batch", "exchange": "exchanging the results of the step"}
DEVICE_PHASES = {"gradients": "adding up the gradients", "update": "updating the weights"}  # run asynchronously
PHASES = HOST_PHASES | DEVICE_PHASES  # between the instructions of two steps: the work as an error report names it
WORKER_NUMBERS = ("late", "span", "busy", "waited_for_data", "memory_bytes", *PHASES)


def event_now(device: torch.device) -> torch.Event:
    """Returns an event that the GPU records after all work that was started before."""
    kind = torch.get_device_module(device)
    event: torch.Event = kind.Event(enable_timing=True)
    event.record(kind.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Returns the seconds from one mark to another of the same kind."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


class Meter:
    """Records the instructions of one step after another, and the phases that follow them.

    On a GPU the instructions run asynchronously, so events are recorded in their stream and read when the results of
    the step have been; nothing is synchronised in between.

    Args:
        device: this worker's device.
        where: the meter writes into it which step and phase run.

    Attributes:
        began: seconds of the machine's monotonic clock, which all its processes share, when the step began.
        spans: begin and end of each instruction of the last step that was read, in seconds of that clock.
    """

    def __init__(self, device: torch.device, where: Position) -> None:
        self._where, self._device, self._on_gpu = where, device, device.type != "cpu"
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        self._phase_marks: list[tuple[str, Mark, Mark]] = []
        self._phases_before = self._phase_marks  # those between the step before and this one
        self.began, self._started = 0.0, 0.0
        self.spans: list[Span] = []

    def begin_step(self, number: int | None = None) -> None:
        """Starts the clock of a step.

        Args:
            number: number of the step, from 1, for error reports; None: it has none.
        """
        self._where.step = number
        self._phases_before, self._phase_marks, self._marks = self._phase_marks, [], []
        self.began = time.perf_counter()
        self._started = self.mark()

    def mark(self) -> Mark:
        """Returns the present moment."""
        return event_now(self._device) if self._on_gpu else time.perf_counter()

    def record(self, instruction: Instruction, started: Mark) -> None:
        """Records that ``instruction`` has run from ``started`` to now."""
        self._marks.append((instruction, started, self.mark()))

    def read_step(self, reached: Mark = None) -> tuple[dict[str, float], float]:
        """Fills `spans` with the times of the step.

        On a GPU this first waits for the instructions, and sets `began` to when the GPU, not its host, began the step.

        Args:
            reached: a mark after the instructions, for which the host has just waited; None: this waits for the last.

        Returns:
            The seconds of each phase before the step, and the seconds from its begin to the end of its last
            instruction.
        """
        ended = self._marks[-1][2] if self._marks else self._started
        if self._on_gpu:
            reached = reached or ended
            reached.synchronize()
            self.began = time.perf_counter() - seconds_between(self._started, reached)
        self.spans = [Span(instruction, self._time(a), self._time(b)) for instruction, a, b in self._marks]
        return {n: seconds_between(a, b) for n, a, b in self._phases_before}, seconds_between(self._started, ended)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the time of the context's body, and names its work in error reports.

        Args:
            name: one of `PHASES`.
        """
        now = self.mark if name in DEVICE_PHASES else time.perf_counter
        started = now()
        with self._where.doing(PHASES[name]):
            yield
        self._phase_marks.append((name, started, now()))

    def recording(self) -> list[tuple[str, float, float]]:
        """Returns (name, begin, end) of each instruction of the step and each phase since, in seconds of the clock.

        On a GPU this first waits for all its work.
        """
        if self._on_gpu:
            torch.get_device_module(self._device).synchronize(self._device)
        phases = [(name, self._time(a), self._time(b)) for name, a, b in self._phase_marks]
        return [*((str(span.instruction), span.start, span.end) for span in self.spans), *phases]

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Returns the seconds per (kind of instruction, cell) in the last step that was read."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)

    def _time(self, mark: Mark) -> float:
        """Returns the mark in seconds of the machine's monotonic clock."""
        return mark if isinstance(mark, float) else self.began + seconds_between(self._started, mark)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this worker in bytes: taken from its GPU by torch, or resident in its process."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
