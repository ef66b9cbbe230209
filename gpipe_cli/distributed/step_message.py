"""Lays out the vector that all workers add up (`Exchange`): the plan of the step that begins, the result of the last.

Each worker writes what it alone knows, all add up their vectors, and every worker reads the whole. Only this file
knows the fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from ..pipeline.step import (
    KINDS_OF_TIME,
    PHASES,
    TIME_OF,
    WORKER_NUMBERS,
    Meter,
    StepPlan,
    StepRecord,
    StepResult,
    peak_memory,
)
from ..schedule.instruction import COMPUTE
from ..tasks.base import Task
from .world import Exchange, World

STOPS = ("request", "time limit", "epochs")
FLAGS = (*STOPS, "failed", "trains others")
Slots = tuple[int, ...]  # the shape of a field
_TYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


@dataclass(frozen=True)
class BatchShape:
    """Holds the number of dimensions of each input and each target of a micro-batch."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> BatchShape:
        return cls(*(tuple(tensor.dim() for tensor in side) for side in micro_batch))

    @property
    def sizes(self) -> int:
        """Returns how many integers the shapes and types of one micro-batch have together."""
        return sum(dimensions + 1 for side in (self.inputs, self.targets) for dimensions in side)


class StopRequested(Exception):
    """Raised on all workers at the same place when an evaluation ends early because the run was asked to stop."""


class PlanMessage(Exchange):
    """Tells all workers the next mini-batch's plan, and flags (`FLAGS`): why to stop, whether a worker has failed.

    Args:
        world: the workers.
        shape: dimensions of every micro-batch's tensors.
        M: the most micro-batches that a mini-batch has in one replica.
        of_replica: shapes of further fields that each replica fills, by name.
        more: sizes of other fields.
    """

    def __init__(
        self,
        world: World,
        shape: BatchShape,
        M: int,
        of_replica: Mapping[str, Slots] = MappingProxyType({}),
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.world, self._shape, self._replica = world, shape, world.replica
        self._shapes = {"micro_batches": (), "weights": (M,), "shapes": (M, shape.sizes), **of_replica}
        fields = {name: world.replicas * math.prod(form) for name, form in self._shapes.items()}
        super().__init__({**fields, "flags": len(FLAGS), **more}, world.all_ranks)

    def mine(self, field: str) -> Tensor:
        """Returns this replica's slots of a field, to be written."""
        return self.own[field].view(self.world.replicas, *self._shapes[field])[self._replica]

    def everyones(self, field: str) -> Tensor:
        """Returns the slots of a field that the replicas have written, [replicas, …]."""
        return self.total[field].view(self.world.replicas, *self._shapes[field])

    def write_plan(self, micro_batches: Sequence[MicroBatch], weights: Sequence[float]) -> None:
        """Writes number, weights, shapes and types of the micro-batches of this replica's next mini-batch.

        After its last mini-batch a replica writes none.

        Raises:
            ValueError: a tensor has another number of dimensions than in the first mini-batch.
        """
        self.mine("micro_batches").fill_(len(micro_batches))
        if not micro_batches:
            return
        rows = []
        for micro_batch in micro_batches:
            if (found := BatchShape.of(micro_batch)) != self._shape:
                raise ValueError(
                    f"the data changed its form: {found} after {self._shape}; all micro-batches "
                    "must have as many tensors, of as many dimensions, as the first"
                )
            tensors = [tensor for side in micro_batch for tensor in side]
            rows.append([size for tensor in tensors for size in (*tensor.shape, _TYPES.index(tensor.dtype))])
        self.mine("weights")[: len(rows)] = torch.tensor(weights, dtype=torch.float64)
        self.mine("shapes")[: len(rows)] = torch.tensor(rows, dtype=torch.float64)

    def read_plan(self, kind: str) -> StepPlan:
        """Returns the plan that all workers know after `run`.

        Args:
            kind: purpose of the plan (train, evaluate, …), which becomes part of the signatures.
        """
        counts: list[int] = self.everyones("micro_batches").long().tolist()
        shapes = self.everyones("shapes").long()  # zeros where nothing is used
        weights: list[list[float]] = self.everyones("weights").tolist()
        replica, raised = self._replica, self.flags
        own = shapes[replica, : counts[replica]].tolist()
        return StepPlan(
            signatures=tuple((kind, *row) for row in own),
            total_weight=sum(chain(*weights)),
            total_micro_batches=sum(counts),
            examples=int(shapes[..., 0].sum()),
            empty=frozenset(number for number in range(len(own)) if not weights[replica][number]),
            stop=next((stop for stop in STOPS if stop in raised), "" if all(counts) else "end of data"),
        )

    def write_flag(self, flag: str, raised: bool) -> None:
        """Writes whether this worker raises one of `FLAGS`."""
        self.own["flags"][FLAGS.index(flag)] = raised

    @property
    def flags(self) -> set[str]:
        """Returns the flags that at least one worker has raised."""
        return {flag for flag, workers in zip(FLAGS, self.total["flags"].tolist(), strict=True) if workers}

    def run_unless_stopped(self, stop_requested: Callable[[], bool]) -> None:
        """Exchanges the vector, as `run` does, and ends if a worker was asked to stop.

        Raises:
            StopRequested: at least one worker was asked to; raised on every worker.
        """
        self.write_flag("request", stop_requested())
        self.run()
        if "request" in self.flags:
            raise StopRequested


class StepMessage(PlanMessage):
    """Tells all workers the results of a training step, too, and those of evaluations.

    Args:
        world, shape, M: arguments of `PlanMessage`.
        K: cells.
        losses: indices of the layers with an auxiliary loss, in order, and last `TASK`.
        places: index of each parameter of the model, by full name.
        own: the names of this worker's parameters.
        task: the task, whose statistics and metrics have slots.
    """

    def __init__(
        self,
        world: World,
        shape: BatchShape,
        M: int,
        K: int,
        losses: Sequence[int],
        places: Mapping[str, int],
        own: Iterable[str],
        task: Task,
    ) -> None:
        self._losses, self._places = losses, places
        self._own_places = torch.tensor([places[name] for name in own], dtype=torch.int64)
        of_replica: dict[str, Slots] = {
            "losses": (len(losses), M),
            "statistics": (len(task.statistics),),
            "metrics": (len(task.metrics),),
            "cell_seconds": (K, len(KINDS_OF_TIME)),
            "worker_numbers": (world.workers, len(WORKER_NUMBERS)),
        }
        more = {"squared_norms": len(places), "used": len(places), "written": world.workers}
        super().__init__(world, shape, M, of_replica, more)

    def write_result(self, record: StepRecord, squares: Tensor, used: Iterable[str]) -> None:
        """Writes losses, statistics and squared gradient norms, which come from the device in one copy.

        Args:
            record: this worker's; each loss, by (layer, micro-batch), is on one worker of the replica.
            squares: squared norms of this worker's gradients, in the order of `own`; empty if nobody asks for the norm.
            used: names of the parameters that this worker has used.
        """
        losses = torch.stack([*record.losses.values()]).to(squares) if record.losses else squares[:0]
        statistics = squares[:0] if record.statistics is None else record.statistics.to(squares)
        parts = [losses, statistics, squares]
        numbers = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
        layers, micro_batches = [self._losses.index(layer) for layer, _ in record.losses], [m for _, m in record.losses]
        self.mine("losses")[layers, micro_batches] = numbers[0]
        if record.statistics is not None:
            self.mine("statistics")[:] = numbers[1]
        if self._replica == 0 and len(squares):  # the gradients of the others are the same
            self.own["squared_norms"][self._own_places] = numbers[2]
        self.own["used"][[self._places[name] for name in used]] = 1.0

    def write_times(self, meter: Meter, phases: Mapping[str, float], span: float, waited_for_data: float) -> None:
        """Writes this worker's times and its peak memory.

        Args:
            phases, span: result of `Meter.read_step`.
        """
        cells, busy = self.mine("cell_seconds").tolist(), 0.0  # zeros
        for (op, cell), spent in meter.seconds().items():
            busy += spent if op in COMPUTE else 0.0
            cells[cell][KINDS_OF_TIME.index(TIME_OF[op])] += spent
        self.mine("cell_seconds")[:] = torch.tensor(cells, dtype=torch.float64)
        between = {**dict.fromkeys(PHASES, 0.0), **phases}
        late, memory = meter.began - self.ended_at, peak_memory(self.world.device)
        row = [late, span, busy, waited_for_data, memory, *between.values()]
        self.mine("worker_numbers")[self.world.worker] = torch.tensor(row, dtype=torch.float64)

    @property
    def gradient_norm(self) -> float:
        """Returns the norm of all gradients, summed in the order of the parameters."""
        return math.sqrt(sum(self.total["squared_norms"].tolist()))

    def read_result(self, plan: StepPlan) -> StepResult:
        """Returns the step's result; losses are added up in the same order for every K."""
        first, *others = self.everyones("losses").unbind(1)
        losses = sum(others, first).tolist()
        workers = self.everyones("worker_numbers").flatten(0, 1).T
        late, span_of_each, busy, *_ = workers
        began = float(late[:: self.world.workers].max())  # when the last of the workers that read data began
        span = (float((late + span_of_each).max()) - began) * self.world.size
        seconds = self.everyones("cell_seconds").mean(0).tolist()
        cells = [dict(zip(KINDS_OF_TIME, cell, strict=True)) for cell in seconds]
        for cell in cells:
            cell["waiting"] = cell["waiting_for_activation"] + cell["waiting_for_gradient"]
        return StepResult(
            plan=plan,
            loss=sum(loss for row in losses for loss in row) / plan.total_weight if plan.total_weight else 0.0,
            losses=losses,
            gradient_norm=self.gradient_norm,
            statistics=self.everyones("statistics").sum(0).tolist(),
            bubble=max(0.0, 1 - float(busy.sum()) / span) if span else 0.0,
            cells=cells,
            numbers=dict(zip(WORKER_NUMBERS, workers.tolist(), strict=True)),
        )

    def read_used(self) -> set[str]:
        """Returns the names of the parameters that at least one worker has used in the step."""
        users = self.total["used"].tolist()
        return {name for name, place in self._places.items() if users[place]}

    def write_saved(self, step: int) -> None:
        """Writes the last step for which this worker's files are on disk; −1 for none."""
        self.own["written"][self.world.worker] = step + 1

    def is_saved(self, step: int) -> bool:
        """Returns whether the files of all workers for this step are on disk."""
        return bool((self.total["written"] == step + 1).all())


def refuse_unlike_lengths(inputs: Tensors, targets: Tensors) -> None:
    """Raises ConfigurationError where the first dimensions, which count examples, are not the same."""
    sides = {"inputs": inputs, "targets": targets}
    lengths = {f"{side}[{i}]": [*tensor.shape[:1]] for side, own in sides.items() for i, tensor in enumerate(own)}
    if len({*map(tuple, lengths.values())}) > 1 or [] in lengths.values():
        found = ", ".join(f"{name} {length[0] if length else 'has none'}" for name, length in lengths.items())
        raise ConfigurationError(f"the first dimension counts examples, the same in all tensors, but it is: {found}")
