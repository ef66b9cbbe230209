"""Defines what is said of a training step: its plan, the record of one worker, the result that all know."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..micro_batch import MicroBatch


@dataclass(frozen=True)
class StepPlan:
    """Says what is to be done with one mini-batch.

    Attributes:
        signatures: shapes and types of each micro-batch of this replica; no micro-batches: nothing to do here.
        total_weight: weight of the whole mini-batch, over all replicas.
        total_micro_batches: micro-batches of all replicas; 0: the data of all has ended.
        examples: examples of the whole mini-batch.
        empty: numbers of this replica's micro-batches of weight 0, whose loss does not count, whatever it is.
        stop: why training ends before this mini-batch; "" where it goes on. It ends with the data of the first
            replica, because a mini-batch needs all.
        step, steps: number of the training step, from 0, on which the noise depends; and of all steps, 0: not known.
        loss_scale: factor of all gradients.
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
    """Holds what all workers know of a training step when they have met.

    Attributes:
        plan: what was to be done.
        loss: loss of the mini-batch, per unit of weight.
        losses: unscaled sums by replica, then micro-batch.
        gradient_norm: global, before clipping.
        statistics: sums over the mini-batch.
        bubble: share of the workers' time that is not computing, from when the first worker begins the step until the
            last one ends it. What rank 0 does between the steps, such as drawing pictures, lies outside.
        cells: seconds per cell (mean over replicas) for each of `KINDS_OF_TIME`, and "waiting", for both neighbours.
        numbers: by each of `WORKER_NUMBERS` one for each rank: seconds from the exchange before the step to its begin
            on this worker; from there to its last instruction; the computing time of that; seconds for which the first
            worker waited for this mini-batch; the peak memory; and seconds of each of `PHASES` between the step before
            and this one, because they end after the workers have met.
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
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def overflowed(self) -> bool:
        """Returns whether a smaller loss scale may help: the loss is finite, its scaled gradients are not."""
        return self.plan.loss_scale > 1 and math.isfinite(self.loss) and not math.isfinite(self.gradient_norm)

    @property
    def workers(self) -> list[dict[str, float]]:
        """Returns the numbers of each rank by their names."""
        return [dict(zip(self.numbers, row, strict=True)) for row in zip(*self.numbers.values(), strict=True)]
