"""Makes plans of a run: measures its layers once, then cuts, simulates and adds up for one pipeline after another.

It needs neither hardware nor data: layers are measured on tensors without values (`measure`), memory follows from the
instruction lists that would run (`memory`), times from a described device (`cells`). Under `plan.device=this` layers
and loss are run and timed on the machine as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import starmap
from math import ceil, isfinite, log2
from typing import get_args

import torch

from ..config import PipelineConfig, Placement, Settings
from ..cpu import as_worker
from ..factory.build import build_autocast, build_model, build_task
from ..factory.example import asks_for_example, example_micro_batch, with_example
from ..factory.groups import Groups
from ..micro_batch import MicroBatch
from ..partition.cost import LayerTimes, layer_costs
from ..partition.cut import Cut, places_without_cut
from ..partition.cutter import durations, instruction_lists
from ..partition.fake_layers import CostError
from ..schedule.early import post_early
from ..schedule.instruction import Instruction, Op
from ..schedule.schedule import most_kept
from ..schedule.simulate import simulate
from .bound import bound_of_any_cut, step_bound
from .cells import CellPlan, Links, TimeModel, cell_times, graphs_of_layers, sizes_of_cell, tie_messages
from .fitting_cut import cut_that_fits, limits_of_workers
from .kept import KeptMemory, trained
from .measure.kept_profile import profiled
from .measure.layer_facts import ModelFacts, measure_model
from .measure.this_device import measure_device, present_device, update_seconds, workers_on_a_gpu
from .memory import PROCESS, most_alive
from .options import Options
from .plan import Plan, worker_plans

BANDWIDTH = 0.7  # share of a described memory's bytes/s that is reached: an assumption
LONGEST_PROFILE = 3.0  # seconds of one forward and backward of each kind of layer; timing takes about six of them


class Planner:
    """Plans one model on one kind of device, with any pipeline. What it has measured once it keeps.

    Args:
        settings: the configuration. `pipeline.workers=auto` is one worker for each cell, at most
            `options.most_workers`.
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
        self._task = build_task(settings.task, settings.seed)
        most_cells = settings.pipeline if options.fit is None else replace(settings.pipeline, K=len(self.builders))
        self._section = self.with_workers(most_cells)  # this machine is measured as one of its workers has it
        build_autocast(settings.precision, present_device(self._section))  # for the kernels of a run
        self.device = options.device or measure_device(self._section)
        self._on_cpus = self.device.kernels == "cpu"
        reached = self.device  # the rates of this machine are measured, those of others are peaks
        if options.device is not None:
            shares_of = {"flops": options.efficiency, "half_flops": options.efficiency, "bandwidth": BANDWIDTH}
            reached = replace(reached, **{key: getattr(reached, key) * share for key, share in shares_of.items()})
        self._times = TimeModel(reached)
        self._measured = cache(self._measure)
        self._kept = KeptMemory(settings)
        self._timed_update = update_seconds(settings) if options.device is None else None

    def with_workers(self, pipeline: PipelineConfig) -> PipelineConfig:
        """Returns the section with a number in place of `pipeline.workers=auto`."""
        return replace(pipeline, workers=pipeline.workers_in(self.options.most_workers or pipeline.K))

    @cached_property
    def has_batchnorm(self) -> bool:
        """Returns whether layers normalise over the examples of a micro-batch."""
        return any(layer.gathered for layer in self._measured(self.settings.pipeline.replicas).layers)

    def plan(self, pipeline: PipelineConfig | None = None) -> Plan:
        """Returns the plan for `settings`, or for another section `pipeline`.

        Raises:
            ConfigurationError: the model cannot be cut so, or there is no such schedule.
        """
        pipeline = self.with_workers(pipeline or self.settings.pipeline)
        if pipeline.placement == "auto":
            return self._faster_placed(pipeline)
        model = self._measured(pipeline.M * pipeline.replicas)
        limits = self.limits(pipeline)
        links = Links(self.device, pipeline, self.options.node)
        cut = cut_that_fits(model, model.times, pipeline, self._kept, limits, self._on_cpus)
        lists = instruction_lists(pipeline, cut.placement)
        cells = self._cells(pipeline, model, cut, lists)
        sizes, times = [cell.sizes for cell in cells], [cell.seconds for cell in cells]

        def latency(sent: Instruction) -> float:
            to = sent.cell + (1 if sent.op is Op.SEND_ACTIVATION else -1)
            return links.transfer(sizes[sent.cell].by_message[sent.op], cut.placement[sent.cell], cut.placement[to])

        posts = None if self._on_cpus else post_early(lists)
        timeline = simulate(lists, cut.placement, durations(times, lists), latency, self.device.host, posts)
        alive = [most_alive(each, sizes, cut.placement, self._on_cpus) for each in lists]
        workers = list(worker_plans(cells, alive, self._on_cpus * PROCESS, limits, pipeline.offload))
        fullest = max(workers, key=lambda worker: worker.total / worker.limit)
        ties = list(tie_messages(cut.uses(model.names), model))
        sent = sum(sizes[i.cell].by_message[i.op] for each in lists for i in each if i.sent_message is not None)
        update, any_cut = self._update_seconds(pipeline, model, cells, ties, links), self.least_seconds(pipeline)
        room = [worker.limit - worker.process - worker.model for worker in workers]
        graphs = [cell.graph for cell in cells]
        bound = max(step_bound(times, graphs, cut.placement, pipeline.M, room), any_cut)
        keys = ("K", "M", "replicas", "placement", "remat", "keep", "schedule", "offload")
        return Plan(
            **{key: getattr(pipeline, key) for key in keys},
            workers=len(lists),
            device=self.device,
            examples=model.examples,
            micro_batch=[*map(str, model.inputs)],
            parameters=cut.parameters,
            cells=cells,
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
            notes=model.notes,
            timeline=timeline,
            lists=lists,
        )

    def _faster_placed(self, pipeline: PipelineConfig) -> Plan:
        """Returns the plan of the faster placement on nodes, with a note that compares both where they differ."""
        several = self.options.node is not None and pipeline.replicas > 1 and pipeline.worker_count > 1
        plans = [self.plan(replace(pipeline, placement=each)) for each in get_args(Placement)[: 1 + several]]
        best, *others = sorted(plans, key=lambda plan: plan.step_seconds)
        chosen = f"placement {best.placement}: a step is planned to take {best.step_seconds:.3g} s"
        said = [f"{chosen}, with {other.placement} {other.step_seconds:.3g} s" for other in others]
        return replace(best, notes=[*best.notes, *said])

    def least_seconds(self, pipeline: PipelineConfig) -> float:
        """Returns the least seconds of a step, however the model is cut and scheduled, without the update.

        Raises:
            ConfigurationError: the model takes no such micro-batches.
        """
        pipeline = self.with_workers(pipeline)
        model = self._measured(pipeline.M * pipeline.replicas)
        # Tied parameters have copies and more gradients in some cuts, and optimizer state can be shared out better.
        kept = self._kept.layers(model)
        least = sum(each.kept - each.tied - (each.optimizer if pipeline.shard_optimizer else 0) for each in kept)
        limits = [limit - self._on_cpus * PROCESS for limit in self.limits(pipeline)]
        speeds = pipeline.speeds or [1.0] * pipeline.worker_count
        layers = [each.slower(1 / max(speeds)) for each in self._times.layers(model)]
        graphs, room = graphs_of_layers(model), sum(limits) - least
        return bound_of_any_cut(layers, graphs, speeds, pipeline.M, max(limits), room)

    def limits(self, pipeline: PipelineConfig) -> list[float]:
        """Returns the bytes that each worker's device may hold."""
        plan = self.options.fit or self.options.memory
        devices = [self.device.memory] * pipeline.worker_count
        return limits_of_workers(pipeline if plan is None else replace(pipeline, memory=plan), devices)

    def _measure(self, count: int) -> ModelFacts:
        """Measures layers and loss for a mini-batch of this many micro-batches (M times replicas)."""
        micro_batch, examples = example_micro_batch(self.settings, count, self.options.longest)
        precision, kernels = self.settings.precision, self.device.kernels
        model = measure_model(self.builders, self._task.loss, micro_batch, precision, kernels)
        if model.failure is not None:
            raise model.failure
        if self.options.device is None:
            self._time_layers(model, micro_batch)
        times = self._times.layers(model)
        if self._section.cost != "profile":
            times = list(map(LayerTimes.of_cost, layer_costs(self.builders, model, self._section.cost)))
        model.notes.extend(places_without_cut(model))
        return replace(model, times=times, examples=examples)

    def _time_layers(self, model: ModelFacts, micro_batch: MicroBatch) -> None:
        """Times layers and loss on this machine, or reads the times that a run has kept.

        The micro-batch is of ones, which may stand for tokens, labels and pixels. If timing takes too long or fails,
        the model gets a note, and its times are computed.
        """
        here = present_device(self._section)
        inputs, targets = (tuple(torch.ones_like(tensor, device="cpu") for tensor in side) for side in micro_batch)
        seconds = sum(self._times.layer(of).total for of in set(model.with_loss))  # equal layers are timed once
        try:
            with as_worker(self._section.threads):  # a profile is kept for a number of threads
                short, say = seconds <= LONGEST_PROFILE, model.notes.append
                found = profiled(self.builders, (inputs, targets), self.settings, here, say, may_measure=short)
        except (CostError, RuntimeError) as error:
            model.notes.append(f"layers are not timed here ({error}): times follow from the machine's measured rates")
            return
        # The GPU was this process's alone; workers that share it take turns.
        sharing = workers_on_a_gpu(self._section, self._section.planned_workers * self._section.replicas)
        both = zip(model.with_loss, [*found.layers, found.loss], strict=False)
        self._times.measured.update({facts: times.slower(sharing) for facts, times in both if times})

    def _cells(
        self, pipeline: PipelineConfig, model: ModelFacts, cut: Cut, lists: Sequence[Sequence[Instruction]]
    ) -> list[CellPlan]:
        """Returns the plan of each cell: its bytes, and its seconds at its worker's speed."""
        sizes = [sizes_of_cell(model, members) for members in cut.layers]
        speeds = [pipeline.speeds[worker] if pipeline.speeds else 1.0 for worker in cut.placement]
        layers = self._times.layers(model)
        cells_of = zip(cut.layers, sizes, speeds, strict=True)
        times = [cell_times(layers[own.start : own.stop], size).slower(1 / speed) for own, size, speed in cells_of]
        most, whole = [most_kept(each) for each in lists], sum(time.total for time in times) or 1.0
        halves = any(i.op is Op.WEIGHT_GRADIENT for each in lists for i in each)
        cells = []
        for number, kept in enumerate(self._kept.of_cells(model, cut, pipeline)):
            row, size = {**cut.table[number], "share": times[number].total / whole}, sizes[number]
            waiting, graphs = (of_cell[number] for of_cell in most[cut.placement[number]])
            cell = CellPlan(
                **vars(kept),
                **row,
                start=cut.layers[number].start,
                seconds=times[number],
                sizes=size,
                inputs_in_flight=waiting,
                inputs=waiting * (size.inputs if number else size.message),
                working=size.working(graphs, halves),
            )
            cells.append(cell)
        return cells

    def _update_seconds(
        self,
        pipeline: PipelineConfig,
        model: ModelFacts,
        cells: Sequence[CellPlan],
        ties: Sequence[tuple[int, int, int]],
        links: Links,
    ) -> float:
        """Returns the seconds between the last backward and the next step.

        They are those of sums over replicas, messages for tied parameters, the exchange and the optimizer's update.

        Args:
            ties: (sender, receiver, bytes) of each message for tied parameters.
        """
        passes = 1.5 if pipeline.shard_optimizer else 1.0  # updated weights go to the other replicas
        seconds = [0.0] * pipeline.worker_count
        for cell in cells:
            members = range(cell.start, cell.start + cell.layers)
            own = [each for i in members for each in trained(model.names[i], model.parameters[i])]
            if self._timed_update is None:
                seconds[cell.worker] += self._times.update(cell, len(own))
            else:
                shares_of_it = pipeline.replicas if pipeline.shard_optimizer else 1
                seconds[cell.worker] += sum(starmap(self._timed_update, own)) / shares_of_it
            reduced = sum(shape.bytes for _, shape in own)
            seconds[cell.worker] += passes * links.reduction(reduced, cell.worker)
        for sender, receiver, size in ties:
            for worker in (sender, receiver):
                seconds[worker] += links.transfer(size, sender, receiver)
        rounds = 2 * ceil(log2(pipeline.worker_count * pipeline.replicas))  # of the exchange, up a tree and down
        return max(seconds) + rounds * (self.device.host + self.device.latency)
