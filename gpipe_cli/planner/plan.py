"""The plan of a run as plain data: how it is cut, what every cell and worker holds, how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..layers import LayerBuilder
from ..partition.layer_times import LayerTimes
from ..schedule.instruction import Instruction
from ..schedule.schedule import most_kept
from ..schedule.simulate import Timeline
from .cells import CellFacts
from .devices import Device
from .memory import Alive


@dataclass(frozen=True)
class CellPlan:
    """One cell. Sizes are bytes; seconds are of one micro-batch.

    Attributes:
        share: of all cells' time.
        inference_seconds: of a forward without a graph; forward_seconds: with one; recompute_seconds: of the second
            one; backward_seconds: as a whole; input_gradient_seconds, weight_gradient_seconds: of its halves, for a
            schedule that has them.
        inputs_in_flight, graphs_in_flight: the most micro-batches whose input, whose graph is kept at once.
        inputs: of all boundary inputs in flight.
        working: what the graphs in flight hold beside them, and what runs: with re-materialization, its peak.
        total: of all of the above; cells that share a worker do not reach it at the same time.
    """

    cell: int
    worker: int
    first: str
    last: str
    layers: int
    parameters: int
    flops: float
    share: float
    inference_seconds: float
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    weights: float
    gradients: float
    optimizer: float
    average: float
    inputs_in_flight: int
    graphs_in_flight: int
    inputs: int
    working: int
    total: float


@dataclass(frozen=True)
class WorkerPlan:
    """One device. Bytes.

    Attributes:
        model: weights, gradients, optimizer state, averaged weights.
        activations: the most of everything else at one moment; parts: what that is.
        total: of both.
    """

    worker: int
    cells: list[int]
    model: float
    activations: int
    parts: dict[str, int]
    kept: int
    total: float


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it runs.

    Attributes:
        parameters: of the whole model.
        slowest_over_mean: how much longer the slowest cell takes than the mean, as a share.
        better_cut: layers of each cell if they were cut by these times; None where that gains less than 1 %, or where a
            run would refuse it. better_cut_gain: by how much its slowest worker is faster, as a share.
        sent_bytes: between workers, in one step of one replica.
        bubble_formula: of W workers with v equal cells each: (W-1) / (M+W-1), with `interleaved_1f1b` (W-1) / (vM+W-1);
            None where the schedule has none. bubble: of the simulated schedule, waits for messages included.
        step_seconds: with the optimizer's update.
        memory: most bytes on any device. limit: what a device may hold.
        optimizer_bytes, weight_bytes, gradient_bytes, activation_bytes: over all devices.
        notes: assumptions, and changes to the configuration that made it possible to plan.
        found: the keys that a search was for, with their values; empty for a plain plan.
        tried: number of plans made in that search.
    """

    K: int
    M: int
    workers: int
    replicas: int
    remat: str
    schedule: str
    device: Device
    examples: int
    micro_batch: list[str]
    parameters: int
    cells: list[CellPlan]
    workers_plan: list[WorkerPlan]
    slowest_over_mean: float
    better_cut: list[int] | None
    better_cut_gain: float
    sent_bytes: int
    bubble_formula: float | None
    bubble: float
    step_seconds: float
    update_seconds: float
    memory: float
    limit: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: int
    notes: list[str]
    timeline: Timeline = field(repr=False, compare=False)
    lists: list[list[Instruction]] = field(repr=False, compare=False)
    found: dict[str, Any] = field(default_factory=dict)
    tried: int = 1

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    @property
    def model_memory(self) -> float:
        """Returns the bytes of weights, gradients and optimizer state on the device that holds most of them."""
        return max(worker.model for worker in self.workers_plan)

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values: everything but the instruction lists and their timeline."""
        own = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("timeline", "lists", "cells", "workers_plan", "device")
        }
        return {
            **own,
            "fits": self.fits,
            "examples_per_second": self.examples_per_second,
            "device": self.device.to_json(),
            "cells": [asdict(cell) for cell in self.cells],
            "devices": [asdict(worker) for worker in self.workers_plan],
        }


@dataclass(frozen=True)
class ModelBytes:
    """What a cell holds between steps."""

    weights: float
    gradients: float
    optimizer: float
    average: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.average


def cell_plans(
    builders: Sequence[LayerBuilder],
    cells: Sequence[CellFacts],
    times: Sequence[LayerTimes],
    model: Sequence[ModelBytes],
    placement: Sequence[int],
    lists: Sequence[Sequence[Instruction]],
    remat: str,
) -> list[CellPlan]:
    kept = [most_kept(each) for each in lists]
    whole = sum(time.total for time in times) or 1.0
    made = []
    for number, (cell, time, bytes_) in enumerate(zip(cells, times, model, strict=True)):
        worker, size = placement[number], cell.sizes
        inputs = kept[worker].inputs[number] * (cell.inputs_bytes if number else size.message)
        graphs = kept[worker].graphs[number]
        graph = size.graph + size.outputs
        working = (graphs - 1) * graph + max(size.forward, graph + size.backward)
        made.append(
            CellPlan(
                cell=number,
                worker=worker,
                first=builders[cell.first].name,
                last=builders[cell.last].name,
                layers=cell.last - cell.first + 1,
                parameters=cell.parameters,
                flops=cell.flops,
                share=time.total / whole,
                inference_seconds=time.inference,
                forward_seconds=time.forward,
                recompute_seconds=time.recompute,
                backward_seconds=time.backward,
                input_gradient_seconds=time.input_gradient,
                weight_gradient_seconds=time.weight_gradient,
                weights=bytes_.weights,
                gradients=bytes_.gradients,
                optimizer=bytes_.optimizer,
                average=bytes_.average,
                inputs_in_flight=kept[worker].inputs[number],
                graphs_in_flight=graphs,
                inputs=inputs,
                working=working,
                total=bytes_.total + inputs + working,
            )
        )
    return made


def worker_plans(placement: Sequence[int], model: Sequence[ModelBytes], alive: Sequence[Alive]) -> list[WorkerPlan]:
    made = []
    for worker, most in enumerate(alive):
        own = [cell for cell, of in enumerate(placement) if of == worker]
        held = sum(model[cell].total for cell in own)
        made.append(WorkerPlan(worker, own, held, most.peak, most.parts, most.kept, held + most.peak))
    return made
