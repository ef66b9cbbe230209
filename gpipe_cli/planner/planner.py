"""Makes plans of a run: measures its layers once, then cuts, simulates and adds up for one pipeline after another.

It needs neither hardware nor data: layers are measured on tensors without values (`measure`), memory follows from the
instruction lists that would run (`memory`), times from a described device (`timing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from math import isfinite

from ..config import PipelineConfig, Settings
from ..errors import ConfigurationError
from ..factory.build import build_model, build_optimizer, build_task
from ..factory.example import asks_for_example, example_micro_batch, with_example
from ..factory.memory_check import optimizer_state_bytes
from ..optim.sharding import shares
from ..partition.cut import Cut
from ..partition.layer_times import LayerTimes
from ..partition.tie_search import Ties, find_ties
from ..schedule.instruction import Instruction, ScheduleError
from ..schedule.schedule import kept_graphs, schedule
from ..schedule.simulate import bubble_by_formula, simulate
from .bound import CellLoad, bound_of_any_cut, step_bound
from .cells import CellFacts, build_cells, graphs_of_layers
from .measure.layer_facts import LayerFacts
from .measure.measurement import Measurement, Measurements
from .measure.this_device import measure_device
from .memory import CellSizes, Wire, most_alive, sent_bytes
from .options import Options
from .plan import ModelBytes, Plan, WorkerPlan, cell_plans, worker_plans
from .room import bytes_of_workers, cut_that_fits, held_bytes, limits_of_workers
from .tie_bytes import tie_messages, trained_parameters
from .timing import TimeModel, cell_times, durations


class Planner:
    """Plans one model on one kind of device, with any pipeline; keeps what it has measured.

    Args:
        settings: the configuration; `pipeline.workers=auto`: one for each cell, at most `options.most_workers`.
        options: the section `plan`.

    Raises:
        ConfigurationError: the model cannot be built or planned.
    """

    def __init__(self, settings: Settings, options: Options) -> None:
        if asks_for_example(settings.model):
            (inputs, _), _ = example_micro_batch(settings, 1, options.longest)
            settings = replace(settings, model=with_example(settings.model, inputs))
        self.settings, self.options = settings, options
        self.builders = build_model(settings.model, settings.seed)
        most_cells = settings.pipeline if options.fit is None else replace(settings.pipeline, K=len(self.builders))
        measured = replace(settings, pipeline=self._with_workers(most_cells))
        self.device = options.device or measure_device(measured.pipeline)
        self._times = TimeModel(self.device)  # the rates of this machine are measured, those of others are peaks
        if options.device is not None:
            self._times = TimeModel(self.device, options.efficiency, options.bandwidth_efficiency)
        self._kernels = self.device.kernels if options.kernels == "auto" else options.kernels
        task = build_task(settings.task, settings.seed)
        self._measurements = Measurements(measured, options, self.builders, task, self._times, self._kernels)
        self._state_bytes = cache(partial(optimizer_state_bytes, partial(build_optimizer, settings.optimizer)))

    def _with_workers(self, pipeline: PipelineConfig) -> PipelineConfig:
        """Returns the section with a number in place of `pipeline.workers=auto`."""
        most = self.options.most_workers
        return replace(pipeline, workers=pipeline.planned_workers if most is None else pipeline.workers_in(most))

    @cached_property
    def _ties(self) -> Ties:
        """Returns the tied parameters; after the layers were measured, whose errors are clearer."""
        return find_ties(self.builders)

    @property
    def _names(self) -> list[str]:
        """Returns the names of the layers."""
        return [builder.name for builder in self.builders]

    @cached_property
    def has_batchnorm(self) -> bool:
        """Returns whether layers normalise over the examples of a micro-batch."""
        layers = self._measurements.of(self.settings.pipeline.replicas).layers
        return any(layer.batchnorm for layer in layers)

    def plan(self, pipeline: PipelineConfig | None = None) -> Plan:
        """Returns the plan for `settings`, or for another section `pipeline`.

        Raises:
            ConfigurationError: the model cannot be cut so, or there is no such schedule.
        """
        pipeline = self._with_workers(pipeline or self.settings.pipeline)
        measured = self._measurements.of(pipeline.M * pipeline.replicas)
        cut = self._cut(measured, pipeline)
        boundary = measured.inputs, measured.target_bytes
        cells = build_cells(measured.layers, measured.loss, cut, self._names, *boundary)
        try:
            lists = _lists(pipeline, cut)
        except ScheduleError as error:
            raise ConfigurationError(str(error)) from error
        return self._assemble(pipeline, measured, cut, cells, lists)

    def _cut(self, measured: Measurement, pipeline: PipelineConfig) -> Cut:
        """Returns the cut of a run; with `pipeline.partition=auto` one that fits the devices' memory, if any does."""
        bytes_of = partial(
            bytes_of_workers,
            pipeline=pipeline,
            layers=measured.layers,
            loss=measured.loss,
            inputs=measured.inputs,
            target_bytes=measured.target_bytes,
            held=partial(self._held, replace(self.settings, pipeline=pipeline)),
        )
        return cut_that_fits(self.builders, measured.costs, self._ties, pipeline, self.limits(pipeline), bytes_of)

    def _held(self, settings: Settings, layer: LayerFacts) -> float:
        """Returns the bytes that a layer keeps between steps."""
        if self.options.bytes_per_parameter is not None:
            return layer.parameter_count * self.options.bytes_per_parameter
        return held_bytes(settings, self._state_bytes, layer)

    def limits(self, pipeline: PipelineConfig) -> list[float]:
        """Returns the bytes that each worker's device may hold."""
        plan = self.options.fit or self.options.memory
        return limits_of_workers(pipeline if plan is None else replace(pipeline, memory=plan), self.device.memory)

    def _assemble(
        self,
        pipeline: PipelineConfig,
        measured: Measurement,
        cut: Cut,
        cells: list[CellFacts],
        lists: list[list[Instruction]],
    ) -> Plan:
        placement, sizes = cut.placement, [cell.sizes for cell in cells]
        times = self._times_on_workers(cells, placement, pipeline)

        def latency(sent: Instruction) -> float:
            return self._times.transfer(sent_bytes(sent, sizes))

        timeline = simulate(lists, placement, durations(times, lists), latency, self.device.host)
        model = self._sharded([self._model_bytes(cell) for cell in cells], cells, placement, pipeline)
        alive = most_alive(timeline, sizes, self._wire(pipeline))
        workers = worker_plans(placement, model, alive, self.limits(pipeline))
        fullest = max(workers, key=lambda worker: worker.total / worker.limit)
        ties = list(tie_messages(cut.uses(self._names), trained_parameters(self._names, measured.layers)))
        update = self._update_seconds(cells, model, placement, pipeline, ties)
        bound, any_cut = self._bounds(measured, cells, times, model, workers, placement, pipeline)
        return Plan(
            K=pipeline.K,
            M=pipeline.M,
            workers=len(lists),
            replicas=pipeline.replicas,
            remat=pipeline.remat,
            keep=pipeline.keep,
            schedule=pipeline.schedule,
            device=self.device,
            examples=measured.examples,
            micro_batch=[str(tensor.shape) for tensor in measured.inputs],
            parameters=sum(cell.parameters for cell in cells),
            cells=cell_plans(self.builders, cells, times, model, placement, lists),
            workers_plan=workers,
            busiest_over_mean=max(timeline.busy) / (sum(timeline.busy) / len(lists)) - 1,
            sent_bytes=_crossing_bytes(sizes, placement, pipeline.M) + sum(size for _, _, size in ties),
            bubble_formula=bubble_by_formula(pipeline.schedule, len(lists), pipeline.K, pipeline.M),
            bubble=timeline.bubble,
            step_seconds=timeline.span + update,
            update_seconds=update,
            bound_seconds=bound + update if isfinite(bound) else None,
            bound_of_any_cut_seconds=any_cut if isfinite(any_cut) else None,
            memory=fullest.total,
            limit=fullest.limit,
            weight_bytes=sum(bytes_.weights for bytes_ in model),
            gradient_bytes=sum(bytes_.gradients for bytes_ in model),
            optimizer_bytes=sum(bytes_.optimizer for bytes_ in model),
            activation_bytes=sum(worker.activations for worker in workers),
            notes=measured.notes,
            timeline=timeline,
            lists=lists,
        )

    def _times_on_workers(
        self, cells: Sequence[CellFacts], placement: Sequence[int], pipeline: PipelineConfig
    ) -> list[LayerTimes]:
        """Returns the seconds of each cell on its own worker's device."""
        speeds = pipeline.speeds or [1.0] * pipeline.worker_count
        return [
            time.slower(1 / speeds[worker])
            for time, worker in zip(cell_times(cells, self._times), placement, strict=True)
        ]

    def _bounds(
        self,
        measured: Measurement,
        cells: Sequence[CellFacts],
        times: Sequence[LayerTimes],
        model: Sequence[ModelBytes],
        workers: Sequence[WorkerPlan],
        placement: Sequence[int],
        pipeline: PipelineConfig,
    ) -> tuple[float, float]:
        """Returns the seconds that every schedule of this cut, and of any cut, takes at least.

        Tied parameters have copies and more gradients in some cuts, and optimizer state can be shared out better: for
        any cut neither counts.
        """
        graphs = [cell.sizes.graph + cell.sizes.outputs for cell in cells]
        loads = [CellLoad(**asdict(time), graph=graph) for time, graph in zip(times, graphs, strict=True)]
        of_cut = step_bound(loads, placement, pipeline.M, [each.limit - each.model for each in workers], halves=True)
        together = sum(worker.limit for worker in workers)
        for cell, bytes_ in zip(cells, model, strict=True):
            together -= bytes_.total - cell.tied_bytes - (bytes_.optimizer if pipeline.shard_optimizer else 0)
        speeds = pipeline.speeds or [1.0] * len(workers)
        seconds = [each.slower(1 / max(speeds)) for each in self._times.layers(measured.layers, measured.loss)]
        graphs = graphs_of_layers(measured.layers, measured.loss, measured.inputs)
        layers = [CellLoad(**asdict(time), graph=graph) for time, graph in zip(seconds, graphs, strict=True)]
        largest = max(worker.limit for worker in workers)
        of_any = bound_of_any_cut(layers, speeds, pipeline.M, largest, together, halves=True)
        return max(of_cut, of_any), of_any

    def _wire(self, pipeline: PipelineConfig) -> Wire:
        """Returns how messages travel; workers on CPUs are assumed to be on one machine."""
        if self._kernels != "cpu":
            return Wire.NCCL
        return Wire.GLOO if pipeline.backend == "gloo" else Wire.SHARED_MEMORY

    def _model_bytes(self, cell: CellFacts) -> ModelBytes:
        if self.options.bytes_per_parameter is not None:
            return ModelBytes(cell.parameters * self.options.bytes_per_parameter, 0, 0, 0)
        average = cell.average_bytes if self.settings.trainer.average is not None else 0
        return ModelBytes(cell.weight_bytes, cell.gradient_bytes, sum(map(self._state_bytes, cell.trained)), average)

    def _sharded(
        self,
        model: Sequence[ModelBytes],
        cells: Sequence[CellFacts],
        placement: Sequence[int],
        pipeline: PipelineConfig,
    ) -> list[ModelBytes]:
        """Returns the bytes with the optimizer's state on the replica that has most of it."""
        if not pipeline.shard_optimizer or self.options.bytes_per_parameter is not None:
            return list(model)
        parts = {worker: self._largest_share(cells, placement, worker, pipeline.replicas) for worker in set(placement)}
        return [
            replace(bytes_, optimizer=bytes_.optimizer * parts[worker])
            for bytes_, worker in zip(model, placement, strict=True)
        ]

    def _largest_share(self, cells: Sequence[CellFacts], placement: Sequence[int], worker: int, replicas: int) -> float:
        trained = [shape for cell, of in zip(cells, placement, strict=True) if of == worker for shape in cell.trained]
        loads = [0.0] * replicas
        for shape, owner in zip(trained, shares([shape.numel for shape in trained], replicas), strict=True):
            loads[owner] += self._state_bytes(shape)
        return max(loads) / sum(loads) if any(loads) else 1.0

    def _update_seconds(
        self,
        cells: Sequence[CellFacts],
        model: Sequence[ModelBytes],
        placement: Sequence[int],
        pipeline: PipelineConfig,
        ties: Sequence[tuple[int, int, int]],
    ) -> float:
        passes = 1.5 if pipeline.shard_optimizer else 1.0  # updated weights go to the other replicas
        seconds = [0.0] * (max(placement) + 1)
        for cell, bytes_, worker in zip(cells, model, placement, strict=True):
            seconds[worker] += self._times.update(cell, bytes_.optimizer)
            seconds[worker] += passes * self._times.reduction(cell.reduced_bytes, pipeline.replicas)
        for sender, receiver, size in ties:
            for worker in (sender, receiver):
                seconds[worker] += self._times.transfer(size)
        return max(seconds)


def _lists(pipeline: PipelineConfig, cut: Cut) -> list[list[Instruction]]:
    keep = kept_graphs(pipeline.policy, pipeline.K, pipeline.M)
    return schedule(pipeline.schedule, cut.placement, pipeline.M, keep)


def _crossing_bytes(sizes: Sequence[CellSizes], placement: Sequence[int], M: int) -> int:
    """Returns the bytes of a step that cells send to cells of other workers."""
    crossings = [number for number in range(1, len(sizes)) if placement[number] != placement[number - 1]]
    return M * sum(sizes[number].message + sizes[number].input_gradients for number in crossings)
