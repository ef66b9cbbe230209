"""What is measured of a model before it is cut: its layers and its task's loss, for each size of micro-batch.

Always on tensors without values; under `plan.device=this` they are run and timed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ...config import PipelineConfig, Settings
from ...cpu import as_worker, usable_cores
from ...errors import ConfigurationError
from ...factory.build import build_autocast
from ...factory.profiles import KeptProfile, profiled_costs
from ...layers import LayerBuilder
from ...micro_batch import MicroBatch
from ...partition.cost import CostError, LayerCost, Profile, TensorShape, TooFewExamples, layer_costs, profile_layers
from ..options import Options
from ..timing import Clock
from .example import example_micro_batch
from .layer_facts import BoundaryTensor, LayerFacts, measure_layers, measure_loss
from .neighbours import Neighbours
from .this_device import measure_rates, present_device, workers_on_a_gpu

if TYPE_CHECKING:
    from ...tasks.base import Task

LONGEST_PROFILE = 3.0  # seconds of one forward and backward of each kind of layer, of which six are made


@dataclass(frozen=True)
class Measurement:
    """What does not depend on the cut, for one size of micro-batch.

    Attributes:
        layers: of the model.
        loss: of the task; None: it could not be measured.
        costs: by which the model is cut.
        inputs: of the first layer.
        target_bytes: of each target.
        examples: of the mini-batch.
        notes: what was assumed.
    """

    layers: list[LayerFacts]
    loss: LayerFacts | None
    costs: list[LayerCost]
    inputs: tuple[BoundaryTensor, ...]
    target_bytes: list[int]
    examples: int
    notes: list[str]


class Measurements:
    """One for each number of micro_batches that a mini-batch is divided into; remembered, for searches.

    Args:
        settings, options: the configuration, with a number of workers, and the section `plan`.
        builders: the model.
        task: whose loss stands behind the last layer.
        clock: works times out, and is told those that were measured.
        kernels: see `layer_facts.kernels_of`.
        say: is told what takes long, before it begins.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        builders: Sequence[LayerBuilder],
        task: Task,
        clock: Clock,
        kernels: str,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._options, self._builders, self._task = settings, options, builders, task
        self._clock, self._kernels, self._say = clock, kernels, say
        self._here = present_device(settings.pipeline)
        self._sharing = workers_on_a_gpu(settings.pipeline) if options.device is None else 1
        self._known: dict[int, Measurement] = {}
        self._other_workers = _other_workers(settings.pipeline)

    def of(self, micro_batches: int) -> Measurement:
        """For a mini-batch in so many micro_batches: M times replicas.

        Raises:
            ConfigurationError: a layer that cannot be measured, or a mini-batch too small for so many micro_batches.
        """
        if micro_batches not in self._known:
            self._known[micro_batches] = self._measure(micro_batches)
        return self._known[micro_batches]

    def _measure(self, micro_batches: int) -> Measurement:
        settings = self._settings
        part, examples = example_micro_batch(settings.data, micro_batches, self._options.longest)
        inputs, targets = part
        autocast = build_autocast(settings.precision, torch.device("cpu"))
        notes: list[str] = []
        try:
            layers = measure_layers(self._builders, inputs, targets, autocast, self._kernels)
        except TooFewExamples as error:
            raise ConfigurationError(error.with_way_out(micro_batches // settings.pipeline.replicas)) from error
        except CostError as error:
            raise ConfigurationError(str(error)) from error
        try:
            loss = measure_loss(self._task.loss, layers[-1].boundary, targets, autocast)
        except CostError as error:
            loss = None
            notes.append(str(error))
        timed = self._time(layers, loss, part, notes) if self._options.device is None else None
        if self._sharing > 1:
            notes.append(
                f"{self._sharing} workers share a GPU of this machine: each has that part of its memory and speed"
            )
        try:
            costs = self._costs(layers, loss, part, timed, notes)
        except CostError as error:
            raise ConfigurationError(str(error)) from error
        described = tuple(BoundaryTensor(TensorShape.of(tensor), False) for tensor in inputs)
        sizes = [tensor.numel() * tensor.element_size() for tensor in targets]
        return Measurement(layers, loss, costs, described, sizes, examples, notes)

    def _costs(
        self,
        layers: Sequence[LayerFacts],
        loss: LayerFacts | None,
        part: MicroBatch,
        timed: Profile | None,
        notes: list[str],
    ) -> list[LayerCost]:
        """By which the model is cut, as a run on this machine would cut it."""
        how = self._settings.pipeline.cost
        if how != "profile":
            return layer_costs(self._builders, part[0], how)
        with as_worker(self._settings.pipeline.threads):  # a profile is kept for a number of threads
            kept = KeptProfile.of(self._builders, part, self._settings, self._here)
            is_known = kept.read() is not None
            if not is_known and timed is not None:
                kept.write(timed.costs)
                return timed.costs
            if not is_known and not self._soon_timed(layers, loss):
                notes.append(
                    "layers are too large to be timed for a plan: cut by worked-out times, where gpipe-train times "
                    "them (pipeline.cost=profile)"
                )
                return self._worked_out_costs(layers, loss)
            if not is_known:
                self._say("timing the layers on this machine, once, as gpipe-train does (pipeline.cost=profile)")
            return profiled_costs(self._builders, self._with_values(part), self._settings, self._here, notes.append)

    def _worked_out_costs(self, layers: Sequence[LayerFacts], loss: LayerFacts | None) -> list[LayerCost]:
        seconds = self._clock.costs(layers, loss)
        return [
            LayerCost(builder.name, facts.parameter_count, None, None, cost)
            for builder, facts, cost in zip(self._builders, layers, seconds, strict=True)
        ]

    def _soon_timed(self, layers: Sequence[LayerFacts], loss: LayerFacts | None) -> bool:
        """Whether this machine times layers and loss in seconds rather than minutes."""
        return self._clock_here.once(layers, loss) <= LONGEST_PROFILE

    @cached_property
    def _clock_here(self) -> Clock:
        """Of this machine, whatever the plan is for."""
        if self._options.device is None:
            return self._clock
        return Clock(measure_rates(self._settings.pipeline), 1.0, 1.0, {})

    def _time(
        self, layers: Sequence[LayerFacts], loss: LayerFacts | None, part: MicroBatch, notes: list[str]
    ) -> Profile | None:
        """On the present machine layers and loss themselves are timed, as far as that takes seconds."""
        if not self._soon_timed(layers, loss):
            notes.append("layers are too large to be timed here: times follow from the machine's measured rates")
            return None
        try:
            timed = self._run(part)
        except (CostError, RuntimeError) as error:
            notes.append(f"layers could not be timed here ({error}): times follow from the machine's measured rates")
            return None
        # A GPU was this process's alone; the workers that will share it take turns.
        both = [*zip(layers, timed.times, strict=True), *([] if loss is None else [(loss, timed.loss)])]
        self._clock.measured.update({id(facts): times.slower(self._sharing) for facts, times in both if times})
        return timed

    def _run(self, part: MicroBatch) -> Profile:
        autocast = build_autocast(self._settings.precision, self._here)
        given, wanted = self._with_values(part)
        beside = self._other_workers.busy() if self._here.type == "cpu" else nullcontext()
        with as_worker(self._settings.pipeline.threads), beside:
            return profile_layers(
                self._builders, given, self._here, autocast, lambda outputs: self._task.loss(outputs, wanted)[0], wanted
            )

    def _with_values(self, part: MicroBatch) -> MicroBatch:
        """Ones, which may stand for tokens, labels and pixels."""
        given, wanted = (tuple(torch.ones_like(tensor, device=self._here) for tensor in side) for side in part)
        return given, wanted


def _other_workers(pipeline: PipelineConfig) -> Neighbours:
    """Workers of a CPU share the machine with each other, which they feel: as many as compute at the same time."""
    at_once = min(pipeline.planned_workers * pipeline.replicas, usable_cores() // pipeline.threads)
    return Neighbours(max(0, at_once - 1), pipeline.threads)
