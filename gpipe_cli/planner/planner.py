"""Makes plans of a run: measures its layers once, then cuts, simulates and adds up for one pipeline after another.

It needs neither hardware nor data: layers are measured on tensors without values (`measure`), memory follows from the
instruction lists that would run (`memory`), times from a described device (`timing`). Under `plan.device=this` layers
and loss are run and timed on the machine as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import starmap
from math import ceil, isfinite, log2

import torch

from ..config import PipelineConfig, Settings
from ..cpu import as_worker
from ..distributed.optimizer_shards import shares
from ..factory.build import boundary_type_of, build_autocast, build_model, build_task
from ..factory.example import asks_for_example, example_micro_batch, with_example
from ..factory.groups import Groups
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost, LayerTimes, layer_costs
from ..partition.cut import Cut, cut_by_costs, places_without_cut
from ..partition.cutter import durations, instruction_lists
from ..partition.fake_layers import CostError
from ..partition.model_profile import ModelProfile
from ..partition.tie_search import Ties, find_ties
from ..schedule.early import post_early
from ..schedule.instruction import Instruction
from ..schedule.simulate import simulate
from .bound import CellLoad, bound_of_any_cut, step_bound
from .cells import CellFacts, build_cells, graphs_of_layers, tie_messages
from .fitting_cut import held_bytes, limits_of_workers, memory_of_workers
from .measure.kept_profile import profiled
from .measure.layer_facts import LayerFacts, ModelFacts, measure_model
from .measure.this_device import measure_device, present_device, update_seconds, workers_on_a_gpu
from .memory import Wire, most_alive, wire_of
from .memory_check import optimizer_state_bytes
from .options import Options
from .plan import ModelBytes, Plan, cell_plans, worker_plans
from .timing import TimeModel, cell_times

BANDWIDTH = 0.7  # share of a described memory's bytes/s that is reached: an assumption
LONGEST_PROFILE = 3.0  # seconds of one forward and backward of each kind of layer; timing takes about six of them


@dataclass(frozen=True)
class Measurement(ModelFacts):
    """Adds costs to the facts of a model.

    Attributes:
        costs: costs by which the model is cut.
        examples: number of examples in the mini-batch.
    """

    costs: list[LayerCost]
    examples: int


class Planner:
    """Plans one model on one kind of device, with any pipeline; keeps its measurements.

    Args:
        settings: the configuration; `pipeline.workers=auto`: one for each cell, at most `options.most_workers`.
        options: the section `plan`.

    Raises:
        ConfigurationError: the model cannot be built or planned.
    """

    def __init__(self, settings: Settings, options: Options) -> None:
        if asks_for_example(settings.model):
            (inputs, _), _ = example_micro_batch(settings, 1, options.longest)
            settings = replace(settings, model=with_example(settings, inputs))
        self.settings, self.options = settings, options
        groups = Groups(settings.optimizer)
        self.builders = groups.frozen_in(build_model(settings.model, settings.seed))
        if groups.entries:
            groups.told(self.builders)  # refuses entries that select nothing
        self._names = [builder.name for builder in self.builders]
        self._task = build_task(settings.task, settings.seed)
        most_cells = settings.pipeline if options.fit is None else replace(settings.pipeline, K=len(self.builders))
        self._section = self.with_workers(most_cells)  # of which this machine is measured
        build_autocast(settings.precision, present_device(self._section))  # for the kernels of a run
        self.device = options.device or measure_device(self._section)
        reached = self.device  # the rates of this machine are measured, those of others are peaks
        if options.device is not None:
            shares_of = {"flops": options.efficiency, "half_flops": options.efficiency, "bandwidth": BANDWIDTH}
            reached = replace(reached, **{key: getattr(reached, key) * share for key, share in shares_of.items()})
        self._times = TimeModel(reached)
        self._measured = cache(self._measure)
        self._state_bytes = optimizer_state_bytes(settings.optimizer)
        self._timed_update = update_seconds(settings) if options.device is None else None

    def with_workers(self, pipeline: PipelineConfig) -> PipelineConfig:
        """Returns the section with a number in place of `pipeline.workers=auto`."""
        most = self.options.most_workers
        return replace(pipeline, workers=pipeline.planned_workers if most is None else pipeline.workers_in(most))

    @cached_property
    def _ties(self) -> Ties:
        """Returns the tied parameters; after the layers were measured, whose errors are clearer."""
        return find_ties(self.builders)

    @cached_property
    def has_batchnorm(self) -> bool:
        """Returns whether layers normalise over the examples of a micro-batch."""
        return any(layer.batchnorm for layer in self._measured(self.settings.pipeline.replicas).layers)

    def plan(self, pipeline: PipelineConfig | None = None) -> Plan:
        """Returns the plan for `settings`, or for another section `pipeline`.

        Raises:
            ConfigurationError: the model cannot be cut so, or there is no such schedule.
        """
        pipeline = self.with_workers(pipeline or self.settings.pipeline)
        measured = self._measured(pipeline.M * pipeline.replicas)
        return self._assemble(pipeline, measured, self._cut(measured, pipeline))

    def _measure(self, count: int) -> Measurement:
        """Measures layers and loss for a mini-batch of this many micro-batches (M times replicas)."""
        micro_batch, examples = example_micro_batch(self.settings, count, self.options.longest)
        precision = self.settings.precision
        autocast, passed_as = build_autocast(precision, torch.device("cpu")), boundary_type_of(precision)
        model = measure_model(self.builders, self._task.loss, micro_batch, autocast, passed_as, self.device.kernels)
        profile = self._profile(model, micro_batch) if self.options.device is None else None
        if self._section.cost != "profile":
            costs = layer_costs(self.builders, micro_batch[0], self._section.cost)
        elif profile is not None:
            costs = profile.costs
        else:
            counts = [facts.parameter_count for facts in model.layers]
            costs = [*map(LayerCost.timed, self._names, counts, self._times.layers(model))]
        both = zip(costs, model.layers, strict=True)
        costs = [replace(cost, may_end_cell=facts.may_end_cell) for cost, facts in both]
        model.notes.extend(places_without_cut(costs))
        return Measurement(**vars(model), costs=costs, examples=examples)

    def _profile(self, model: ModelFacts, micro_batch: MicroBatch) -> ModelProfile | None:
        """Returns the times of layers and loss here, as a run keeps them; None, with a note, where they take too long.

        Ones may stand for tokens, labels and pixels.
        """
        here = present_device(self._section)
        inputs, targets = (tuple(torch.ones_like(tensor, device="cpu") for tensor in side) for side in micro_batch)
        seconds = sum(self._times.estimate(of).total for of in set(model.with_loss))  # equal layers are timed once
        try:
            with as_worker(self._section.threads):  # a profile is kept for a number of threads
                short, say = seconds <= LONGEST_PROFILE, model.notes.append
                found = profiled(self.builders, (inputs, targets), self.settings, here, say, may_measure=short)
        except (CostError, RuntimeError) as error:
            model.notes.append(f"layers are not timed here ({error}): times follow from the machine's measured rates")
            return None
        # The GPU was this process's alone; workers that share it take turns.
        sharing, both = workers_on_a_gpu(self._section), zip(model.with_loss, [*found.times, found.loss], strict=False)
        self._times.measured.update({facts: times.slower(sharing) for facts, times in both if times})
        return found

    def _cut(self, measured: Measurement, pipeline: PipelineConfig) -> Cut:
        """Returns the cut of a run; with `pipeline.partition=auto` one that fits the devices' memory, if any does."""
        held = list(map(partial(self._held, replace(self.settings, pipeline=pipeline)), self._names, measured.layers))
        limits = self.limits(pipeline)
        wire = wire_of(pipeline, self.device.kernels == "cpu")
        memory_of = partial(memory_of_workers, pipeline=pipeline, model=measured, held=held, limits=limits, wire=wire)
        return cut_by_costs(self.builders, measured.costs, pipeline, pipeline.worker_count, self._ties, memory_of)

    def _held(self, settings: Settings, name: str, layer: LayerFacts) -> float:
        """Returns the bytes that a layer keeps between steps."""
        if self.options.bytes_per_parameter is not None:
            return layer.parameter_count * self.options.bytes_per_parameter
        return held_bytes(settings, self._state_bytes, name, layer)

    def limits(self, pipeline: PipelineConfig) -> list[float]:
        """Returns the bytes that each worker's device may hold."""
        plan = self.options.fit or self.options.memory
        return limits_of_workers(pipeline if plan is None else replace(pipeline, memory=plan), self.device.memory)

    def _assemble(self, pipeline: PipelineConfig, measured: Measurement, cut: Cut) -> Plan:
        cells, lists = list(build_cells(measured, cut, self._names)), instruction_lists(pipeline, cut.placement)
        sizes, speeds = [cell.sizes for cell in cells], pipeline.speeds or [1.0] * len(lists)
        own_times = zip(cell_times(cells, self._times), cells, strict=True)
        times = [time.slower(1 / speeds[cell.worker]) for time, cell in own_times]

        def latency(sent: Instruction) -> float:
            return self._times.transfer(sizes[sent.cell].by_message[sent.op])

        wire = wire_of(pipeline, self.device.kernels == "cpu")
        posts = post_early(lists) if wire is Wire.NCCL else None
        timeline = simulate(lists, cut.placement, durations(times, lists), latency, self.device.host, posts)
        model = list(self._model_bytes(cells, pipeline))
        alive = [most_alive(each, sizes, cut.placement, wire) for each in lists]
        workers = list(worker_plans(cells, model, alive, self.limits(pipeline)))
        fullest = max(workers, key=lambda worker: worker.total / worker.limit)
        ties = list(tie_messages(cut.uses(self._names), self._names, measured.layers))
        sent = sum(sizes[i.cell].by_message[i.op] for each in lists for i in each if i.sent_message is not None)
        update = self._update_seconds(cells, model, pipeline, ties)
        graphs = [cell.sizes.graph + cell.sizes.outputs for cell in cells]
        room = [worker.limit - worker.model for worker in workers]
        bound = step_bound(loads(times, graphs), cut.placement, pipeline.M, room, halves=True)
        # Tied parameters have copies and more gradients in some cuts, and optimizer state can be shared out better.
        ours = [each.total - (each.optimizer if pipeline.shard_optimizer else 0) for each in model]
        together = sum(worker.limit for worker in workers) - sum(ours) + sum(cell.tied_bytes for cell in cells)
        any_cut = self._bound_of_any_cut(measured, pipeline, max(worker.limit for worker in workers), together)
        bound = max(bound, any_cut)
        keys = ("K", "M", "replicas", "remat", "keep", "schedule")
        return Plan(
            **{key: getattr(pipeline, key) for key in keys},
            workers=len(lists),
            device=self.device,
            examples=measured.examples,
            micro_batch=[*map(str, measured.inputs)],
            parameters=sum(cell.parameters for cell in cells),
            cells=list(cell_plans(self.builders, cells, times, model, lists)),
            workers_plan=workers,
            busiest_over_mean=max(timeline.busy) / (sum(timeline.busy) / len(lists)) - 1,
            sent_bytes=sent + sum(size for _, _, size in ties),
            bubble=timeline.bubble,
            step_seconds=timeline.span + update,
            update_seconds=update,
            bound_seconds=bound + update if isfinite(bound) else None,
            bound_of_any_cut_seconds=any_cut if isfinite(any_cut) else None,
            memory=fullest.total,
            limit=fullest.limit,
            notes=measured.notes,
            timeline=timeline,
            lists=lists,
        )

    def _bound_of_any_cut(
        self, measured: Measurement, pipeline: PipelineConfig, memory: float, together: float
    ) -> float:
        """Returns the seconds that every schedule of any cut takes at least; arguments as of `bound_of_any_cut`."""
        speeds = pipeline.speeds or [1.0] * pipeline.worker_count
        seconds = [each.slower(1 / max(speeds)) for each in self._times.layers(measured)]
        layers = loads(seconds, graphs_of_layers(measured))
        return bound_of_any_cut(layers, speeds, pipeline.M, memory, together, halves=True)

    def _model_bytes(self, cells: Sequence[CellFacts], pipeline: PipelineConfig) -> Iterator[ModelBytes]:
        """Yields the bytes that each cell keeps between steps; of a shared optimizer state, the largest share."""
        share = cache(partial(self._largest_share, cells, pipeline.replicas))
        for cell in cells:
            if (each := self.options.bytes_per_parameter) is not None:
                yield ModelBytes(cell.parameters * each, 0, 0, 0)
                continue
            state = sum(starmap(self._state_bytes, cell.trained))
            kept = state * share(cell.worker) if pipeline.shard_optimizer else state
            average = cell.average_bytes if self.settings.trainer.average is not None else 0
            yield ModelBytes(cell.weight_bytes, cell.gradient_bytes, kept, average)

    def _largest_share(self, cells: Sequence[CellFacts], replicas: int, worker: int) -> float:
        trained = [each for cell in cells if cell.worker == worker for each in cell.trained]
        states = [0.0] * replicas
        owners = shares([shape.numel for _, shape in trained], replicas)
        for (name, shape), owner in zip(trained, owners, strict=True):
            states[owner] += self._state_bytes(name, shape)
        return max(states) / sum(states) if any(states) else 1.0

    def _update_seconds(
        self,
        cells: Sequence[CellFacts],
        model: Sequence[ModelBytes],
        pipeline: PipelineConfig,
        ties: Sequence[tuple[int, int, int]],
    ) -> float:
        passes = 1.5 if pipeline.shard_optimizer else 1.0  # updated weights go to the other replicas
        seconds = [0.0] * pipeline.worker_count
        for cell, bytes_ in zip(cells, model, strict=True):
            reduced = sum(shape.bytes for _, shape in cell.trained)
            if self._timed_update is None:
                seconds[cell.worker] += self._times.update(cell, bytes_.optimizer)
            else:
                shares_of_it = pipeline.replicas if pipeline.shard_optimizer else 1
                seconds[cell.worker] += sum(starmap(self._timed_update, cell.trained)) / shares_of_it
            seconds[cell.worker] += passes * self._times.reduction(reduced, pipeline.replicas)
        for sender, receiver, size in ties:
            for worker in (sender, receiver):
                seconds[worker] += self._times.transfer(size)
        rounds = 2 * ceil(log2(pipeline.worker_count * pipeline.replicas))  # of the exchange, up a tree and down
        return max(seconds) + rounds * (self.device.host + self.device.latency)


def loads(times: Sequence[LayerTimes], graphs: Sequence[float]) -> list[CellLoad]:
    """Returns seconds and bytes of layers or cells, as the bounds take them."""
    return [CellLoad(**asdict(time), graph=graph) for time, graph in zip(times, graphs, strict=True)]
