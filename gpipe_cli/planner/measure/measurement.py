"""Measures the layers of a model and its task's loss, for one size of micro-batch and any cut.

Both run on tensors without values; under `plan.device=this` they are run and timed on the machine as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...config import Settings
from ...cpu import as_worker, usable_cores
from ...errors import ConfigurationError
from ...factory.build import boundary_type_of, build_autocast
from ...factory.example import example_micro_batch
from ...factory.kept_profile import kept_costs, profile_file
from ...layers import LayerBuilder
from ...micro_batch import MicroBatch
from ...partition.cost import LayerCost, layer_costs
from ...partition.cut import notes_on_values
from ...partition.fake_layers import CostError, TensorShape, TooFewExamples
from ...partition.model_profile import ModelProfile, profile_layers
from ..options import Options
from ..timing import TimeModel
from .background_load import background_load
from .layer_facts import BoundaryTensor, LayerFacts, measure_layers, measure_loss
from .this_device import present_device, workers_on_a_gpu

if TYPE_CHECKING:
    from ...tasks.base import Task

LONGEST_PROFILE = 3.0  # seconds of one forward and backward of each kind of layer; timing takes about six of them


@dataclass(frozen=True)
class Measurement:
    """Holds what does not depend on the cut, for one size of micro-batch.

    Attributes:
        layers: facts of each layer of the model.
        loss: facts of the task's loss; None where it could not be measured.
        costs: costs by which the model is cut.
        inputs: inputs of the first layer.
        target_bytes: bytes of each target.
        examples: number of examples in the mini-batch.
        notes: assumptions, for the plan.
    """

    layers: list[LayerFacts]
    loss: LayerFacts | None
    costs: list[LayerCost]
    inputs: tuple[BoundaryTensor, ...]
    target_bytes: list[int]
    examples: int
    notes: list[str]


class Measurements:
    """Makes and keeps one `Measurement` for each number of micro-batches that a mini-batch is divided into.

    Args:
        settings: the configuration, with a number of workers.
        options: the section `plan`.
        builders: the model.
        task: its loss stands behind the last layer.
        times: works out times; layers that are timed are added to it.
        kernels: see `layer_facts.kernels_of`.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        builders: Sequence[LayerBuilder],
        task: Task,
        times: TimeModel,
        kernels: str,
    ) -> None:
        self._settings, self._options, self._builders, self._task = settings, options, builders, task
        self._times, self._kernels = times, kernels
        self._here = present_device(settings.pipeline)
        self._sharing = workers_on_a_gpu(settings.pipeline) if options.device is None else 1
        self._known: dict[int, Measurement] = {}

    def of(self, micro_batches: int) -> Measurement:
        """Returns the measurement for a mini-batch of this many micro-batches (M times replicas).

        Raises:
            ConfigurationError: a layer cannot be measured, or the mini-batch has too few examples.
        """
        if micro_batches not in self._known:
            self._known[micro_batches] = self._measure(micro_batches)
        return self._known[micro_batches]

    def _measure(self, count: int) -> Measurement:
        micro_batch, examples = example_micro_batch(self._settings, count, self._options.longest)
        inputs, targets = micro_batch
        precision = self._settings.precision
        autocast = build_autocast(precision, torch.device("cpu"))
        notes: list[str] = []
        try:
            passed_as = boundary_type_of(precision)
            layers = measure_layers(self._builders, inputs, targets, autocast, passed_as, self._kernels)
            try:
                loss = measure_loss(self._task.loss, layers[-1].boundary, targets, autocast)
            except CostError as error:
                loss = None
                notes.append(str(error))
            timed = self._time(layers, loss, micro_batch, notes) if self._options.device is None else None
            costs = [
                replace(cost, by_values=facts.by_values, may_end_cell=facts.may_end_cell)
                for cost, facts in zip(self._costs(layers, loss, micro_batch, timed, notes), layers, strict=True)
            ]
            notes += notes_on_values(costs)
        except TooFewExamples as error:
            raise ConfigurationError(error.with_way_out(count // self._settings.pipeline.replicas)) from error
        except CostError as error:
            raise ConfigurationError(str(error)) from error
        first = tuple(BoundaryTensor(TensorShape.of(tensor), False) for tensor in inputs)
        sizes = [TensorShape.of(tensor).bytes for tensor in targets]
        return Measurement(layers, loss, costs, first, sizes, examples, notes)

    def _costs(
        self,
        layers: Sequence[LayerFacts],
        loss: LayerFacts | None,
        micro_batch: MicroBatch,
        timed: ModelProfile | None,
        notes: list[str],
    ) -> list[LayerCost]:
        """Returns the costs by which the model is cut.

        For `pipeline.cost=profile` on this machine they are those of the profile that a run uses, or this one, which it
        will use; for a described device, and where layers take too long to be timed, they are worked out.
        """
        how = self._settings.pipeline.cost
        if how != "profile":
            return layer_costs(self._builders, micro_batch[0], how)
        if self._options.device is None:
            with as_worker(self._settings.pipeline.threads):  # a profile is kept for a number of threads
                file = profile_file(self._builders, micro_batch, self._settings, self._here)
            if timed is not None or file.exists():
                notes.append(f"pipeline.cost=profile: cut by the profile in {file}")
                return kept_costs(file, lambda: [] if timed is None else timed.costs)
        seconds = self._times.layers(layers, loss)
        return [
            LayerCost(builder.name, facts.parameter_count, None, None, times.total, measured=times)
            for builder, facts, times in zip(self._builders, layers, seconds, strict=True)
        ]

    def _time(
        self, layers: Sequence[LayerFacts], loss: LayerFacts | None, micro_batch: MicroBatch, notes: list[str]
    ) -> ModelProfile | None:
        """Times layers and loss on this machine; returns None, with a note, where that fails or takes too long."""
        distinct = dict.fromkeys([*layers, *([] if loss is None else [loss])])  # equal layers are timed once
        if sum(self._times.estimate(facts).total for facts in distinct) > LONGEST_PROFILE:
            notes.append("layers are too large to be timed here: times follow from the machine's measured rates")
            return None
        try:
            timed = self._profile(micro_batch)
        except (CostError, RuntimeError) as error:
            notes.append(f"layers could not be timed here ({error}): times follow from the machine's measured rates")
            return None
        both = [*zip(layers, timed.times, strict=True), *([] if loss is None else [(loss, timed.loss)])]
        # The GPU was this process's alone; workers that share it take turns.
        self._times.measured.update({facts: times.slower(self._sharing) for facts, times in both if times})
        return timed

    def _profile(self, micro_batch: MicroBatch) -> ModelProfile:
        pipeline = self._settings.pipeline
        autocast = build_autocast(self._settings.precision, self._here)
        # Ones may stand for tokens, labels and pixels.
        inputs, targets = (tuple(torch.ones_like(tensor, device=self._here) for tensor in side) for side in micro_batch)
        at_once = min(pipeline.planned_workers * pipeline.replicas, usable_cores() // pipeline.threads)
        others = max(0, at_once - 1) if self._here.type == "cpu" else 0
        with as_worker(pipeline.threads), background_load(others, pipeline.threads):
            return profile_layers(
                self._builders,
                inputs,
                self._here,
                autocast,
                lambda outputs: self._task.loss(outputs, targets)[0],
                targets,
                boundary_type_of(self._settings.precision),
            )
