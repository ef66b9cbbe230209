"""What the workers tell each other at the end of a training step, and what everybody reads out of it."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..pipeline.engine import StepRecord
from ..pipeline.meter import WAITING
from ..pipeline.schedule import Op
from .exchange import Exchange

PARTS_OF_STEP = ("forward", "recompute", "backward", "waiting")  # seconds per cell
WORKER_NUMBERS = ("span", "busy", "waited_for_data", "memory_bytes")


@dataclass(frozen=True)
class StepReport:
    """One training step as every worker sees it.

    Attributes:
        loss: of the mini-batch, per unit of weight.
        losses: unscaled sums by replica, then micro-batch.
        gradient_norm: global, before clipping.
        bad_parameter: index of the first parameter with a non-finite gradient, in layer order.
        statistics: sums over the mini-batch.
        bubble: share of the workers' time between the step's begin and the end of the slowest that is not spent in
            forward, recompute or backward.
        cells: seconds per cell (mean over replicas) for each of `PARTS_OF_STEP`.
        workers: for each rank the `WORKER_NUMBERS`.
    """

    loss: float
    losses: list[list[float]]
    gradient_norm: float
    bad_parameter: int | None
    statistics: list[float]
    bubble: float
    cells: list[dict[str, float]]
    workers: list[dict[str, float]] = field(repr=False)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def first_bad_micro_batch(self) -> tuple[int, int] | None:
        """(replica, micro-batch) of the first non-finite loss."""
        bad = [(r, m) for r, row in enumerate(self.losses) for m, loss in enumerate(row) if not math.isfinite(loss)]
        return bad[0] if bad else None

    @property
    def waited_for_data(self) -> float:
        """Seconds that the slowest first worker waited for its mini-batch."""
        return max(worker["waited_for_data"] for worker in self.workers)


class StepReporter:
    """Writes this worker's share of the report into the exchange, reads everybody's.

    Args:
        losses: whose losses there are: indices of layers with an auxiliary loss, in order, and last `TASK`.
        cells, micro_batches, replicas: K, M, D.
        ranks: of the whole job.
        parameters: how many the whole model has.
        statistics: how many the task has.
    """

    def __init__(
        self,
        losses: Sequence[int],
        cells: int,
        micro_batches: int,
        replicas: int,
        ranks: int,
        parameters: int,
        statistics: int,
    ) -> None:
        self._losses = list(losses)
        self._cells, self._micro_batches, self._replicas, self._ranks = cells, micro_batches, replicas, ranks
        self._parameters, self._statistics = parameters, statistics

    def fields(self) -> dict[str, int]:
        """The exchange's fields that this needs."""
        return {
            "losses": self._replicas * len(self._losses) * self._micro_batches,
            "squared_norms": self._parameters,
            "statistics": self._replicas * self._statistics,
            "cell_seconds": self._replicas * self._cells * len(PARTS_OF_STEP),
            "workers": self._ranks * len(WORKER_NUMBERS),
        }

    def write_record(self, exchange: Exchange, replica: int, record: StepRecord) -> None:
        """Losses and statistics: each (layer, micro-batch) lies on one worker of the replica."""
        losses = exchange.mine["losses"].view(self._replicas, len(self._losses), self._micro_batches)
        for (layer, micro_batch), loss in record.losses.items():
            losses[replica, self._losses.index(layer), micro_batch] = loss.item()
        if record.statistics is not None:
            exchange.mine["statistics"].view(self._replicas, -1)[replica] = record.statistics.cpu()

    def write_norms(self, exchange: Exchange, first_parameters: Sequence[int], squares: torch.Tensor) -> None:
        """Squared gradient norms of this worker's parameters, at their places in the whole model."""
        exchange.mine["squared_norms"][torch.tensor(first_parameters, dtype=torch.int64)] = squares

    def write_times(
        self,
        exchange: Exchange,
        replica: int,
        rank: int,
        seconds: dict[tuple[Op, int], float],
        span: float,
        waited_for_data: float,
        device: torch.device,
    ) -> None:
        """Seconds of this worker's cells, its span and its memory's high-water mark."""
        cells = exchange.mine["cell_seconds"].view(self._replicas, self._cells, len(PARTS_OF_STEP))
        busy = 0.0
        for (op, cell), spent in seconds.items():
            part = op.name.lower()
            if part in PARTS_OF_STEP:
                busy += spent
            elif op in WAITING:
                part = "waiting"
            else:
                continue
            cells[replica, cell, PARTS_OF_STEP.index(part)] += spent
        row = exchange.mine["workers"].view(self._ranks, len(WORKER_NUMBERS))[rank]
        row.copy_(torch.tensor([span, busy, waited_for_data, peak_memory(device)], dtype=torch.float64))

    def read(self, exchange: Exchange, total_weight: float) -> StepReport:
        """The step's report from the last exchange, in the same order of summation for every K."""
        by_layer = exchange.all["losses"].view(self._replicas, len(self._losses), self._micro_batches).tolist()
        losses = [[sum(row[m] for row in rows) for m in range(self._micro_batches)] for rows in by_layer]
        squares = exchange.all["squared_norms"].tolist()
        bad = next((i for i, square in enumerate(squares) if not math.isfinite(square)), None)
        workers = exchange.all["workers"].view(self._ranks, -1).tolist()
        rows = [dict(zip(WORKER_NUMBERS, worker, strict=True)) for worker in workers]
        span = max(row["span"] for row in rows) * len(rows)
        cells = exchange.all["cell_seconds"].view(self._replicas, self._cells, -1).mean(0).tolist()
        return StepReport(
            loss=sum(loss for row in losses for loss in row) / total_weight if total_weight else 0.0,
            losses=losses,
            gradient_norm=math.sqrt(sum(squares)),
            bad_parameter=bad,
            statistics=exchange.all["statistics"].view(self._replicas, self._statistics).sum(0).tolist(),
            bubble=max(0.0, 1 - sum(row["busy"] for row in rows) / span) if span else 0.0,
            cells=[dict(zip(PARTS_OF_STEP, cell, strict=True)) for cell in cells],
            workers=rows,
        )


def peak_memory(device: torch.device) -> int:
    """The most bytes that this worker has held: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
