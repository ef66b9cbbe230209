"""Exchanges the results and times of a training step between all workers."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed.exchange import Exchange
from ..distributed.pipeline import WorkerPipeline
from ..pipeline.engine import StepRecord
from ..schedule.instruction import COMPUTE, Op

# The kind of time of each operation of a cell. A cell waits for activations from the cell before it and for gradients
# from the cell behind it.
TIME_OF = {
    **{op: op.name.lower() for op in COMPUTE},
    Op.RECEIVE_ACTIVATION: "waiting_for_activation",
    Op.RECEIVE_GRADIENT: "waiting_for_gradient",
    Op.SEND_ACTIVATION: "sending",
    Op.SEND_GRADIENT: "sending",
}
KINDS_OF_TIME = tuple(dict.fromkeys(TIME_OF.values()))  # seconds per cell
PHASES = ("data", "gradients", "exchange", "update")  # between the instructions of two steps, in this order
WORKER_NUMBERS = ("late", "span", "busy", "waited_for_data", "memory_bytes", *PHASES)


@dataclass(frozen=True)
class StepReport:
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
            and this one, because they end after the report has been sent.
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


@dataclass
class StepReporter:
    """Writes this worker's share of the report into the exchange and reads the whole report from it.

    Attributes:
        losses: indices of the layers with an auxiliary loss, in order, and last `TASK`.
        parameters: number of parameters of the whole model.
        statistics: number of the task's statistics.
    """

    pipeline: WorkerPipeline
    losses: Sequence[int]
    parameters: int
    statistics: int

    def __post_init__(self) -> None:
        world = self.pipeline.world
        self.cells, self.micro_batches = len(self.pipeline.placement), self.pipeline.codec.M
        self.replica, self.replicas, self.ranks = world.replica, world.replicas, world.size

    def fields(self) -> dict[str, int]:
        """Returns the fields of the exchange, with their sizes."""
        return {
            "losses": self.replicas * len(self.losses) * self.micro_batches,
            "squared_norms": self.parameters,
            "statistics": self.replicas * self.statistics,
            "cell_seconds": self.replicas * self.cells * len(KINDS_OF_TIME),
            "workers": self.ranks * len(WORKER_NUMBERS),
        }

    def write_results(self, exchange: Exchange, record: StepRecord, own: Sequence[int], squares: Tensor) -> None:
        """Writes losses, statistics and squared gradient norms, which come from the device in one copy.

        Args:
            record: each (layer, micro-batch) is on one worker of the replica.
            own: places of this worker's parameters in the whole model.
            squares: of their gradients' norms.
        """
        losses = torch.stack([*record.losses.values()]).to(squares) if record.losses else squares[:0]
        statistics = squares[:0] if record.statistics is None else record.statistics.to(squares)
        together = [losses, statistics, squares]
        numbers = torch.split(torch.cat(together).cpu(), [len(part) for part in together])
        places = [(self.losses.index(layer), micro_batch) for layer, micro_batch in record.losses]
        mine = exchange.own["losses"].view(self.replicas, len(self.losses), self.micro_batches)[self.replica]
        mine[tuple(torch.tensor(places, dtype=torch.int64).view(-1, 2).T)] = numbers[0]
        if record.statistics is not None:
            exchange.own["statistics"].view(self.replicas, -1)[self.replica] = numbers[1]
        if self.replica == 0:  # the gradients of the others are the same
            exchange.own["squared_norms"][torch.tensor(own, dtype=torch.int64)] = numbers[2]

    def write_times(self, exchange: Exchange, phases: Mapping[str, float], span: float, waited_for_data: float) -> None:
        """Writes this worker's times and its peak memory, before the exchange that carries them.

        Args:
            phases, span: result of `Meter.read_step`.
        """
        meter, world = self.pipeline.engine.meter, self.pipeline.world
        cells = [[0.0] * len(KINDS_OF_TIME) for _ in range(self.cells)]
        busy = 0.0
        for (op, cell), spent in meter.seconds().items():
            busy += spent if op in COMPUTE else 0.0
            cells[cell][KINDS_OF_TIME.index(TIME_OF[op])] += spent
        mine = exchange.own["cell_seconds"].view(self.replicas, self.cells, len(KINDS_OF_TIME))
        mine[self.replica] = torch.tensor(cells, dtype=torch.float64)
        between = {**dict.fromkeys(PHASES, 0.0), **phases}
        late, memory = meter.began - exchange.ended_at, peak_memory(world.device)
        row = [late, span, busy, waited_for_data, memory, *between.values()]
        exchange.own["workers"].view(self.ranks, -1)[world.rank] = torch.tensor(row, dtype=torch.float64)

    def read(self, exchange: Exchange, total_weight: float) -> StepReport:
        """Reads the step's report from the last exchange; sums in the same order for every K."""
        first, *others = exchange.total["losses"].view(self.replicas, len(self.losses), -1).unbind(1)
        losses = sum(others, first).tolist()
        squares = exchange.total["squared_norms"].tolist()
        workers = exchange.total["workers"].view(self.ranks, -1).T
        numbers = dict(zip(WORKER_NUMBERS, workers.tolist(), strict=True))
        late, span_of_each, busy, *_ = workers
        began = float(late[:: self.ranks // self.replicas].max())  # those who read the data
        span = (float((late + span_of_each).max()) - began) * self.ranks
        seconds = exchange.total["cell_seconds"].view(self.replicas, self.cells, -1).mean(0).tolist()
        cells = [dict(zip(KINDS_OF_TIME, cell, strict=True)) for cell in seconds]
        for cell in cells:
            cell["waiting"] = cell["waiting_for_activation"] + cell["waiting_for_gradient"]
        return StepReport(
            loss=sum(loss for row in losses for loss in row) / total_weight if total_weight else 0.0,
            losses=losses,
            gradient_norm=math.sqrt(sum(squares)),
            statistics=exchange.total["statistics"].view(self.replicas, self.statistics).sum(0).tolist(),
            bubble=max(0.0, 1 - float(busy.sum()) / span) if span else 0.0,
            cells=cells,
            numbers=numbers,
        )


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this worker in bytes: allocated on its GPU, or resident in its process."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
