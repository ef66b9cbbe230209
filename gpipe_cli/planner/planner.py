"""Makes the plan of a run: measures its layers once, then cuts, simulates and adds up for one pipeline after another.

No hardware and no data: layers are measured on tensors without values (`layer_facts`), memory is read off the very
instruction lists that would run (`memory`), times come from a described device (`timing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat

from ..config import PipelineConfig, Settings
from ..errors import ConfigurationError
from ..factory.build import Cut, build_model, build_optimizer, build_task, cut_by_costs
from ..partition.partition import cell_costs, partition
from ..partition.sharing import Sharing, find_sharing
from ..schedule.instruction import Instruction, Op, ScheduleError
from ..schedule.schedule import schedule
from ..schedule.simulate import bubble_by_formula, simulate
from .cells import CellFacts, build_cells
from .devices import Device
from .measure.measurement import Measurement, Measurements
from .measure.optimizer_state import OptimizerState
from .memory import Wire, most_alive
from .options import Options
from .plan import ModelBytes, Plan, cell_plans, worker_plans
from .timing import Clock, cell_times, durations

Say = Callable[[str], None]


def say_nothing(line: str) -> None:
    """For those whom nobody listens to."""


class Planner:
    """Plans one model on one kind of device; remembers what it has measured, for searches.

    Args:
        settings: the configuration; `pipeline.workers=auto` is one worker a cell, as far as `options.room` goes.
        options: the section `plan`.
        say: is told what takes long, before it begins.

    Raises:
        ConfigurationError: the model cannot be built or planned.
    """

    def __init__(self, settings: Settings, options: Options, say: Say = say_nothing) -> None:
        self.settings, self.options = settings, options
        self.builders = build_model(settings.model)
        busiest = settings.pipeline if options.fit is None else replace(settings.pipeline, K=len(self.builders))
        measured = replace(settings, pipeline=self._with_workers(busiest))
        self.device = options.device or self._this_device(measured.pipeline)
        self._clock = Clock(self.device, options.efficiency, options.bandwidth_efficiency, {})
        if options.device is None:
            self._clock = replace(self._clock, efficiency=1.0, bandwidth_efficiency=1.0)
        self._kernels = self.device.kernels if options.kernels == "auto" else options.kernels
        task = build_task(settings.task)
        self._measurements = Measurements(measured, options, self.builders, task, self._clock, self._kernels, say)
        self._state = OptimizerState(lambda parameters: build_optimizer(settings.optimizer, parameters))

    @staticmethod
    def _this_device(pipeline: PipelineConfig) -> Device:
        from .measure.this_device import measure_device

        return measure_device(pipeline)

    def _with_workers(self, pipeline: PipelineConfig) -> PipelineConfig:
        """With a number in place of `pipeline.workers=auto`."""
        room = self.options.room
        return replace(pipeline, workers=pipeline.planned_workers if room is None else pipeline.workers_in(room))

    @cached_property
    def _sharing(self) -> Sharing:
        """Once for all plans, and after the layers have been measured, which says better why one cannot be built."""
        return find_sharing(self.builders)

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return self.options.fit or self.options.memory or self.device.memory

    def _notes_on_workers(self, pipeline: PipelineConfig) -> list[str]:
        if self.settings.pipeline.workers != "auto" or pipeline.workers == pipeline.K:
            return []
        return [
            f"{pipeline.K} cells on {pipeline.workers} workers, as gpipe-train starts them on this machine "
            "(pipeline.workers=auto)"
        ]

    def plan(self, pipeline: PipelineConfig | None = None) -> Plan:
        """The plan for `settings`, or with other values of the section `pipeline`.

        Raises:
            ConfigurationError: the model cannot be cut so, or has no such schedule.
        """
        pipeline = self._with_workers(pipeline or self.settings.pipeline)
        measured = self._measurements.of(pipeline.M * pipeline.replicas)
        cut = cut_by_costs(self.builders, measured.costs, pipeline, pipeline.worker_count, self._sharing)
        boundary, repeated = (measured.inputs, measured.target_bytes), self._sharing.repeated
        cells = build_cells(measured.layers, measured.loss, cut.layers, *boundary, repeated)
        try:
            lists = schedule(pipeline.schedule, cut.placement, pipeline.M, pipeline.remat)
        except ScheduleError as error:
            raise ConfigurationError(str(error)) from error
        return self._assemble(pipeline, measured, cut, cells, lists)

    def _assemble(
        self,
        pipeline: PipelineConfig,
        measured: Measurement,
        cut: Cut,
        cells: list[CellFacts],
        lists: list[list[Instruction]],
    ) -> Plan:
        placement, speeds = cut.placement, self._speeds(len(lists))
        times = cell_times(cells, self._clock)

        def latency(sent: Instruction) -> float:
            sizes = cells[sent.cell + 1].sizes if sent.op is Op.SEND_ACTIVATION else cells[sent.cell].sizes
            return self._clock.transfer(sizes.message if sent.op is Op.SEND_ACTIVATION else sizes.input_gradients)

        timeline = simulate(
            lists, placement, durations(times, lists, placement, speeds), latency, self._clock.device.host
        )
        model = [self._model_bytes(cell) for cell in cells]
        sizes = [cell.sizes for cell in cells]
        alive = most_alive(timeline, sizes, self._wire(pipeline))
        rows = cell_plans(self.builders, cells, times, model, placement, lists, pipeline.remat)
        workers = worker_plans(placement, model, alive)
        update = self._update_seconds(cells, model, placement, pipeline.replicas)
        busy = [cell.forward_seconds + cell.backward_seconds for cell in rows]
        better, gain = self._better_cut(measured, pipeline, cut)
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
            cells=rows,
            workers_plan=workers,
            slowest_over_mean=max(busy) / (sum(busy) / len(busy)) - 1,
            better_cut=better,
            better_cut_gain=gain,
            sent_bytes=pipeline.M * sum(sizes[n].message + sizes[n].input_gradients for n in crossings),
            bubble_formula=bubble_by_formula(pipeline.schedule, len(lists), pipeline.K, pipeline.M),
            bubble=timeline.bubble,
            step_seconds=timeline.span + update,
            update_seconds=update,
            memory=max(worker.total for worker in workers),
            limit=self.limit,
            weight_bytes=sum(bytes_.weights for bytes_ in model),
            gradient_bytes=sum(bytes_.gradients for bytes_ in model),
            optimizer_bytes=sum(bytes_.optimizer for bytes_ in model),
            activation_bytes=sum(worker.activations for worker in workers),
            notes=[*measured.notes, *self._notes_on_workers(pipeline)],
            timeline=timeline,
            lists=lists,
        )

    def _wire(self, pipeline: PipelineConfig) -> Wire:
        """Workers of CPUs are taken to be on one machine."""
        if self._kernels != "cpu":
            return Wire.NCCL
        return Wire.GLOO if pipeline.backend == "gloo" else Wire.SHARED_MEMORY

    def _speeds(self, workers: int) -> list[float] | None:
        speeds = self.options.speeds
        if speeds is not None and len(speeds) != workers:
            raise ConfigurationError(
                f"plan.speeds has {len(speeds)} numbers but there are {workers} workers: give one for each"
            )
        return speeds

    def _model_bytes(self, cell: CellFacts) -> ModelBytes:
        if self.options.bytes_per_parameter is not None:
            return ModelBytes(cell.parameters * self.options.bytes_per_parameter, 0, 0, 0)
        average = cell.average_bytes if self.settings.trainer.average is not None else 0
        return ModelBytes(cell.weight_bytes, cell.gradient_bytes, self._state.total(cell.trained), average)

    def _update_seconds(
        self, cells: Sequence[CellFacts], model: Sequence[ModelBytes], placement: Sequence[int], replicas: int
    ) -> float:
        of_workers = [0.0] * (max(placement) + 1)
        for cell, bytes_, worker in zip(cells, model, placement, strict=True):
            of_workers[worker] += self._clock.update(cell, bytes_.optimizer)
            of_workers[worker] += self._clock.reduction(cell.gradient_bytes, replicas)
        return max(of_workers)

    def _better_cut(self, measured: Measurement, pipeline: PipelineConfig, cut: Cut) -> tuple[list[int] | None, float]:
        """What the cut would be by these times, and by how much its slowest worker is faster; below 1 % nothing.

        Nor where a run would refuse it, because layers that share a weight would lie in two cells.
        """
        times = self._clock.costs(measured.layers, measured.loss)
        sizes = partition(times, pipeline.K, "min_max")
        try:
            typed = replace(pipeline, partition=sizes)
            other = cut_by_costs(self.builders, measured.costs, typed, pipeline.worker_count, self._sharing)
        except ConfigurationError:
            return None, 0.0
        best = self._slowest_worker(times, other)
        gain = self._slowest_worker(times, cut) / best - 1 if best else 0.0
        return (sizes, gain) if gain >= 0.01 else (None, 0.0)

    def _slowest_worker(self, times: Sequence[float], cut: Cut) -> float:
        """Seconds that it takes for one micro-batch in all its cells; ``times``: of each layer at speed 1."""
        seconds = [0.0] * (max(cut.placement) + 1)
        for cost, worker in zip(cell_costs(times, cut.sizes), cut.placement, strict=True):
            seconds[worker] += cost
        return max(second / speed for second, speed in zip(seconds, self.options.speeds or repeat(1.0), strict=False))


def plan(settings: Settings, options: Options) -> Plan:
    """The plan of one configuration.

    Raises:
        ConfigurationError: it cannot be planned; the message says what to change.
    """
    return Planner(settings, options).plan()
