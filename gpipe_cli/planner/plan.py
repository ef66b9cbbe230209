"""The plan of a run: how it is cut, what every cell and worker holds, how long a step takes, how large the bubble is.

No hardware and no data: layers are measured on tensors without values (`layer_facts`), memory is read off the very
instruction lists that would run (`memory`), times come from a described device (`timing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..config import PipelineConfig, Settings
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..pipeline.boundary import Tensors
from ..pipeline.cost import CostError, LayerCost, TensorShape, layer_costs
from ..pipeline.partition import partition
from ..pipeline.schedule import Instruction, Op, ScheduleError, most_kept, schedule
from ..pipeline.simulate import Timeline, ideal_bubble, simulate
from ..trainer.build import (
    Cut,
    build_autocast,
    build_model,
    build_optimizer,
    build_task,
    cut_by_costs,
    refuse_sharing_across_cells,
)
from .cells import CellFacts, build_cells
from .devices import Device
from .example import example_part
from .layer_facts import BoundaryTensor, LayerFacts, measure_layers, measure_loss
from .memory import Alive, most_alive
from .optimizer_state import OptimizerState
from .options import Options
from .timing import CellTimes, Clock, cell_times, durations

LONGEST_PROFILE = 3.0  # seconds of one forward and backward of each kind of layer, of which six are made


@dataclass(frozen=True)
class CellPlan:
    """One cell. Sizes are bytes; seconds are of one micro-batch.

    Attributes:
        share: of all cells' time.
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
    forward_seconds: float
    backward_seconds: float
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
        better_cut: layers of each cell if they were cut by these times; None where that gains less than 1 %.
        sent_bytes: between workers, in one step of one replica.
        bubble_formula: (W-1) / (M+W-1) for W workers. bubble: of the simulated schedule, waits for messages included.
        step_seconds: with the optimizer's update.
        memory: most bytes on any device. limit: what a device may hold.
        optimizer_bytes, weight_bytes, gradient_bytes, activation_bytes: over all devices.
        notes: what was assumed.
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
    bubble_formula: float
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

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

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
class _Measured:
    """What does not depend on the cut: layers, for one size of micro-batch."""

    layers: list[LayerFacts]
    loss: LayerFacts | None
    costs: list[LayerCost]
    inputs: tuple[BoundaryTensor, ...]
    target_bytes: list[int]
    examples: int
    notes: list[str]


class Planner:
    """Plans one model on one kind of device; remembers what it has measured, for searches.

    Args:
        settings: the configuration; `pipeline.workers=auto` is one worker a cell.
        options: the section `plan`.

    Raises:
        ConfigurationError: the model cannot be built or planned.
    """

    def __init__(self, settings: Settings, options: Options) -> None:
        self.settings, self.options = settings, options
        self.builders = build_model(settings.model)
        self._task = build_task(settings.task)
        self.device = options.device or self._this_device()
        self._clock = Clock(self.device, options.efficiency, options.bandwidth_efficiency, {})
        if options.device is None:
            self._clock = replace(self._clock, efficiency=1.0, bandwidth_efficiency=1.0)
        self._kernels = self.device.kernels if options.kernels == "auto" else options.kernels
        self._state = OptimizerState(lambda parameters: build_optimizer(settings.optimizer, parameters))
        self._state_of: dict[int, int] = {}
        self._measured: dict[int, _Measured] = {}

    def _this_device(self) -> Device:
        from .this_device import measure_device

        return measure_device(self.settings.pipeline)

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return self.options.fit or self.options.memory or self.device.memory

    def plan(self, pipeline: PipelineConfig | None = None) -> Plan:
        """The plan for `settings`, or with other values of the section `pipeline`.

        Raises:
            ConfigurationError: the model cannot be cut so, or has no such schedule.
        """
        pipeline = pipeline or self.settings.pipeline
        workers = pipeline.K if pipeline.workers == "auto" else pipeline.workers
        measured = self._measure(pipeline)
        cut = cut_by_costs(self.builders, measured.costs, pipeline, workers)
        refuse_sharing_across_cells(self.builders, cut.sizes)
        cells = build_cells(measured.layers, measured.loss, cut.layers, measured.inputs, measured.target_bytes)
        try:
            lists = schedule(pipeline.schedule, cut.placement, pipeline.M, pipeline.remat)
        except ScheduleError as error:
            raise ConfigurationError(str(error)) from error
        return self._assemble(pipeline, measured, cut, cells, lists)

    def _measure(self, pipeline: PipelineConfig) -> _Measured:
        parts = pipeline.M * pipeline.replicas
        if parts not in self._measured:
            self._measured[parts] = self._measure_parts(parts)
        return self._measured[parts]

    def _measure_parts(self, parts: int) -> _Measured:
        settings = self.settings
        (inputs, targets), examples = example_part(settings.data, parts, self.options.longest)
        autocast = build_autocast(settings.precision, torch.device("cpu"))
        notes: list[str] = []
        try:
            layers = measure_layers(self.builders, inputs, targets, autocast, self._kernels)
            how = settings.pipeline.cost
            example = tuple(torch.zeros_like(t, device="cpu") for t in inputs) if how == "profile" else inputs
            costs = layer_costs(self.builders, example, how)
        except CostError as error:
            raise ConfigurationError(str(error)) from error
        if self.options.device is None and settings.precision.autocast is None:
            self._time_layers(inputs, layers, notes)
        try:
            loss = measure_loss(self._task.loss, layers[-1].boundary, targets, autocast)
        except CostError as error:
            loss = None
            notes.append(str(error))
        described = tuple(BoundaryTensor(TensorShape.of(tensor), False) for tensor in inputs)
        sizes = [tensor.numel() * tensor.element_size() for tensor in targets]
        return _Measured(layers, loss, costs, described, sizes, examples, notes)

    def _time_layers(self, inputs: Tensors, layers: Sequence[LayerFacts], notes: list[str]) -> None:
        """On the present machine the layers themselves are timed, as far as that takes seconds."""
        estimated = {id(layer): self._clock.layer(layer) for layer in layers}
        if sum(time.forward + time.backward for time in estimated.values()) > LONGEST_PROFILE:
            notes.append("layers are too large to be timed here: times follow from the machine's measured rates")
            return
        device = torch.device("cuda" if self._kernels != "cpu" else "cpu")
        values = tuple(torch.zeros_like(tensor, device=device) for tensor in inputs)
        before = torch.get_num_threads()
        torch.set_num_threads(self.settings.pipeline.threads)
        try:
            timed = layer_costs(self.builders, values, "profile", device=device)
        except (CostError, RuntimeError) as error:
            notes.append(f"layers could not be timed here ({error}): times follow from the machine's measured rates")
            return
        finally:
            torch.set_num_threads(before)
        for layer, cost in zip(layers, timed, strict=True):
            time = estimated[id(layer)]
            scale = cost.cost / (time.forward + time.backward)
            self._clock.measured[id(layer)] = time.scaled(scale)

    def _assemble(
        self,
        pipeline: PipelineConfig,
        measured: _Measured,
        cut: Cut,
        cells: list[CellFacts],
        lists: list[list[Instruction]],
    ) -> Plan:
        placement, speeds = cut.placement, self._speeds(len(lists))
        times = cell_times(cells, self._clock)

        def latency(sent: Instruction) -> float:
            sizes = cells[sent.cell + 1].sizes if sent.op is Op.SEND_ACTIVATION else cells[sent.cell].sizes
            return self._clock.transfer(sizes.message if sent.op is Op.SEND_ACTIVATION else sizes.input_gradients)

        timeline = simulate(lists, placement, durations(times, lists, placement, speeds), latency)
        model = [self._model_bytes(cell) for cell in cells]
        sizes = [cell.sizes for cell in cells]
        alive = most_alive(timeline, sizes, sends_stay=self._kernels == "cpu")
        cell_plans = _cell_plans(self.builders, cells, times, model, placement, lists, pipeline.remat)
        workers = _worker_plans(placement, model, alive)
        update = self._update_seconds(cells, model, placement, pipeline.replicas)
        busy = [cell.forward_seconds + cell.backward_seconds for cell in cell_plans]
        better, gain = self._better_cut(measured, pipeline, max(busy))
        crossings = [number for number in range(1, len(cells)) if placement[number] != placement[number - 1]]
        return Plan(
            K=pipeline.K,
            M=pipeline.M,
            workers=len(lists),
            replicas=pipeline.replicas,
            remat=pipeline.remat,
            schedule=pipeline.schedule,
            device=self.device,
            examples=measured.examples,
            micro_batch=[str(tensor.shape) for tensor in measured.inputs],
            parameters=sum(cell.parameters for cell in cells),
            cells=cell_plans,
            workers_plan=workers,
            slowest_over_mean=max(busy) / (sum(busy) / len(busy)) - 1,
            better_cut=better,
            better_cut_gain=gain,
            sent_bytes=pipeline.M * sum(sizes[n].message + sizes[n].input_gradients for n in crossings),
            bubble_formula=ideal_bubble(len(lists), pipeline.M),
            bubble=timeline.bubble,
            step_seconds=timeline.span + update,
            update_seconds=update,
            memory=max(worker.total for worker in workers),
            limit=self.limit,
            weight_bytes=sum(bytes_.weights for bytes_ in model),
            gradient_bytes=sum(bytes_.gradients for bytes_ in model),
            optimizer_bytes=sum(bytes_.optimizer for bytes_ in model),
            activation_bytes=sum(worker.activations for worker in workers),
            notes=measured.notes,
            timeline=timeline,
            lists=lists,
        )

    def _speeds(self, workers: int) -> list[float] | None:
        speeds = self.options.speeds
        if speeds is not None and len(speeds) != workers:
            raise ConfigurationError(
                f"plan.speeds has {len(speeds)} numbers but there are {workers} workers: give one for each"
            )
        return speeds

    def _model_bytes(self, cell: CellFacts) -> _ModelBytes:
        if self.options.bytes_per_parameter is not None:
            return _ModelBytes(cell.parameters * self.options.bytes_per_parameter, 0, 0, 0)
        average = cell.weight_bytes if self.settings.trainer.average is not None else 0
        return _ModelBytes(cell.weight_bytes, cell.gradient_bytes, sum(map(self._state_bytes, cell.layers)), average)

    def _state_bytes(self, layer: LayerFacts) -> int:
        if id(layer) not in self._state_of:  # `_measured` keeps every layer's facts, so that no id comes twice
            self._state_of[id(layer)] = self._state.total(shape for _, shape in layer.parameters)
        return self._state_of[id(layer)]

    def _update_seconds(
        self, cells: Sequence[CellFacts], model: Sequence[_ModelBytes], placement: Sequence[int], replicas: int
    ) -> float:
        of_workers = [0.0] * (max(placement) + 1)
        for cell, bytes_, worker in zip(cells, model, placement, strict=True):
            of_workers[worker] += self._clock.update(cell, bytes_.optimizer)
            of_workers[worker] += self._clock.reduction(cell.gradient_bytes, replicas)
        return max(of_workers)

    def _better_cut(
        self, measured: _Measured, pipeline: PipelineConfig, slowest: float
    ) -> tuple[list[int] | None, float]:
        """What the cut would be by these times, and by how much its slowest cell is faster; below 1 % nothing."""
        times = [self._clock.layer(layer) for layer in measured.layers]
        costs = [time.forward + time.backward for time in times]
        if measured.loss is not None:
            of_loss = self._clock.layer(measured.loss)
            costs[-1] += of_loss.forward + of_loss.backward
        sizes = partition(costs, pipeline.K, "min_max")
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        best = max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        gain = slowest / best - 1 if best else 0.0
        return (sizes, gain) if gain >= 0.01 else (None, 0.0)


@dataclass(frozen=True)
class _ModelBytes:
    """What a cell holds between steps."""

    weights: float
    gradients: float
    optimizer: float
    average: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.average


def plan(settings: Settings, options: Options) -> Plan:
    """The plan of one configuration.

    Raises:
        ConfigurationError: it cannot be planned; the message says what to change.
    """
    return Planner(settings, options).plan()


def _cell_plans(
    builders: Sequence[LayerBuilder],
    cells: Sequence[CellFacts],
    times: Sequence[CellTimes],
    model: Sequence[_ModelBytes],
    placement: Sequence[int],
    lists: Sequence[Sequence[Instruction]],
    remat: str,
) -> list[CellPlan]:
    kept = [most_kept(each) for each in lists]
    whole = sum(time.forward + time.backward for time in times) or 1.0
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
                share=(time.forward + time.backward) / whole,
                forward_seconds=time.forward,
                backward_seconds=time.backward,
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


def _worker_plans(placement: Sequence[int], model: Sequence[_ModelBytes], alive: Sequence[Alive]) -> list[WorkerPlan]:
    made = []
    for worker, most in enumerate(alive):
        own = [cell for cell, of in enumerate(placement) if of == worker]
        held = sum(model[cell].total for cell in own)
        made.append(WorkerPlan(worker, own, held, most.peak, most.parts, most.kept, held + most.peak))
    return made
