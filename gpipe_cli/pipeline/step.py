"""Defines a step's plan, which all workers know before it begins, and its result, when they have met."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepPlan:
    """Describes one mini-batch over all replicas.

    Attributes:
        signatures: of this replica's micro-batches; equal when all shapes and types are. Empty: nothing to do here.
        total_weight: of the whole mini-batch, over all replicas.
        total_micro_batches: micro-batches of all replicas; 0: the data of all has ended.
        examples: of the whole mini-batch.
        empty: numbers of this replica's micro-batches of weight 0, whose loss does not count.
        stop: why training ends before this mini-batch; "" where it goes on. It ends with the data of the first
            replica, because a mini-batch needs all.
    """

    signatures: tuple[tuple[object, ...], ...]
    total_weight: float
    total_micro_batches: int
    examples: int
    empty: frozenset[int] = frozenset()
    stop: str = ""


@dataclass(frozen=True)
class StepResult:
    """Holds one training step, the same on every worker.

    Attributes:
        loss: of the mini-batch, per unit of weight.
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
    """

    loss: float
    losses: list[list[float]]
    gradient_norm: float
    statistics: list[float]
    bubble: float
    cells: list[dict[str, float]]
    numbers: Mapping[str, list[float]] = field(repr=False)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def workers(self) -> list[dict[str, float]]:
        """Returns the numbers of each rank by their names."""
        return [dict(zip(self.numbers, row, strict=True)) for row in zip(*self.numbers.values(), strict=True)]
