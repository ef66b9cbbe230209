"""Defines the plan of a run as plain data: its cut, the bytes of every cell and worker, the time of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..schedule.instruction import Instruction
from ..schedule.simulate import Timeline
from .cells import CellPlan
from .options import Device


@dataclass(frozen=True)
class WorkerPlan:
    """Describes the memory of one device, in bytes.

    Attributes:
        worker: number of the worker.
        cells: numbers of its cells.
        model: bytes of weights, gradients, optimizer state and averaged weights.
        activations: bytes of everything else at the worst moment of a step.
        by_kind: these bytes by kind (`memory.KINDS`).
        process: bytes of Python and the libraries, if they share the device's memory.
        total: sum of model, activations and process.
        limit: bytes that the device may hold.
    """

    worker: int
    cells: list[int]
    model: float
    activations: int
    by_kind: dict[str, int]
    process: float
    total: float
    limit: float


@dataclass(frozen=True)
class Plan:
    """Holds the plan of a run.

    Attributes:
        workers: number of workers of one replica.
        device: device of each worker.
        examples: number of examples in a mini-batch.
        micro_batch: shapes of the inputs of a micro-batch.
        parameters: number of parameters of the whole model.
        busiest_over_mean: share by which the busiest worker computes longer than the mean.
        sent_bytes: bytes between workers in one step of one replica.
        bubble: bubble of the simulated schedule, waits for messages included.
        step_seconds: seconds of a step, the optimizer's update included.
        update_seconds: those of the update, of sums over replicas and tied parameters, and of the exchange.
        bound_seconds: seconds that every schedule of this cut takes at least, the update included (`bound`); None
            where none fits.
        bound_of_any_cut_seconds: seconds that every schedule of any cut takes at least, without the update; None if
            none fits.
        memory: bytes on the device that is fullest for its size.
        limit: bytes that it may hold.
        notes: assumptions, and changes to the configuration that made it possible to plan.
        timeline, lists: the simulated step and its instruction lists.
        found: the keys that a search was for, with their values; empty for a plain plan.
        tried: number of plans made in that search.
        rivals: the next best that it found, and the fastest that does not fit, if any: keys that the search chose, with
            their values, step_seconds, memory, and whether it fits.
    """

    K: int
    M: int
    workers: int
    replicas: int
    placement: str
    remat: str
    keep: int | list[int] | None
    schedule: str
    offload: bool
    device: Device
    examples: int
    micro_batch: list[str]
    parameters: int
    cells: list[CellPlan]
    workers_plan: list[WorkerPlan]
    busiest_over_mean: float
    sent_bytes: int
    bubble: float
    step_seconds: float
    update_seconds: float
    bound_seconds: float | None
    bound_of_any_cut_seconds: float | None
    memory: float
    limit: float
    notes: list[str]
    timeline: Timeline = field(repr=False, compare=False)
    lists: list[list[Instruction]] = field(repr=False, compare=False)
    found: dict[str, Any] = field(default_factory=dict)
    tried: int = 1
    rivals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Returns whether the fullest device holds its share."""
        return self.memory <= self.limit

    @property
    def examples_per_second(self) -> float:
        """Returns the examples of all replicas per second of a step."""
        return self.examples / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: everything but the instruction lists and their timeline."""
        plain = asdict(replace(self, timeline=Timeline([], ()), lists=[]))
        del plain["timeline"], plain["lists"]
        devices = plain.pop("workers_plan")
        for cell, planned in zip(plain["cells"], self.cells, strict=True):
            cell["total"] = planned.total
        return {**plain, "fits": self.fits, "examples_per_second": self.examples_per_second, "devices": devices}


def worker_plans(
    cells: Sequence[CellPlan], alive: Sequence[dict[str, int]], process: float, limits: Sequence[float], offload: bool
) -> Iterator[WorkerPlan]:
    """Yields the plan of every worker.

    Args:
        alive: bytes by kind at each worker's worst moment (`most_alive`).
        process: bytes of each worker's process; 0 for GPUs.
        limits: most bytes of each device.
        offload: a cell's state is in memory only while the cell or the one before it runs, or while it is updated.
    """
    for worker, (by_kind, limit) in enumerate(zip(alive, limits, strict=True)):
        own = [cell for cell in cells if cell.worker == worker]
        held, activations = sum(cell.kept for cell in own), sum(by_kind.values())
        if offload:  # two neighbouring cells with weights and gradients or, as a GPU's host updates, one cell's update
            running = [cell.weights + cell.gradients for cell in own]
            held = max(map(sum, zip(running, [0, *running], strict=False)))
            held = max(held, *(cell.kept for cell in own if process))
        numbers = [cell.cell for cell in own]
        total = held + activations + process
        yield WorkerPlan(worker, numbers, held, activations, by_kind, process, total, limit)
