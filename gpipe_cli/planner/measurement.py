"""What is measured of a model before it is cut: its layers and its task's loss, for each size of micro-batch.

Always on tensors without values; under `plan.device=this` they are run and timed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import PipelineConfig, Settings
from ..cpu import as_worker, usable_cores
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..pipeline.boundary import Tensors
from ..pipeline.cost import CostError, LayerCost, Profile, TensorShape, layer_costs, profile_layers
from ..trainer.build import build_autocast
from .example import example_part
from .layer_facts import BoundaryTensor, LayerFacts, measure_layers, measure_loss
from .neighbours import Neighbours
from .options import Options
from .timing import Clock

if TYPE_CHECKING:
    from ..tasks.base import Task

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
    """One for each number of parts that a mini-batch is divided into; remembered, for searches.

    Args:
        settings, options: the configuration and the section `plan`.
        builders: the model.
        task: whose loss stands behind the last layer.
        clock: works times out, and is told those that were measured.
        kernels: see `layer_facts.kernels_of`.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        builders: Sequence[LayerBuilder],
        task: Task,
        clock: Clock,
        kernels: str,
    ) -> None:
        self._settings, self._options, self._builders, self._task = settings, options, builders, task
        self._clock, self._kernels = clock, kernels
        self._known: dict[int, Measurement] = {}
        self._other_workers = _other_workers(settings.pipeline)

    def of(self, parts: int) -> Measurement:
        """For a mini-batch in so many parts: M times replicas.

        Raises:
            ConfigurationError: a layer that cannot be measured, or a mini-batch too small for so many parts.
        """
        if parts not in self._known:
            self._known[parts] = self._measure(parts)
        return self._known[parts]

    def _measure(self, parts: int) -> Measurement:
        settings = self._settings
        (inputs, targets), examples = example_part(settings.data, parts, self._options.longest)
        autocast = build_autocast(settings.precision, torch.device("cpu"))
        notes: list[str] = []
        try:
            layers = measure_layers(self._builders, inputs, targets, autocast, self._kernels)
        except CostError as error:
            raise ConfigurationError(str(error)) from error
        try:
            loss = measure_loss(self._task.loss, layers[-1].boundary, targets, autocast)
        except CostError as error:
            loss = None
            notes.append(str(error))
        timed = self._time(layers, loss, inputs, targets, notes) if self._options.device is None else None
        costs = self._costs(inputs, targets, timed)
        described = tuple(BoundaryTensor(TensorShape.of(tensor), False) for tensor in inputs)
        sizes = [tensor.numel() * tensor.element_size() for tensor in targets]
        return Measurement(layers, loss, costs, described, sizes, examples, notes)

    def _costs(self, inputs: Tensors, targets: Tensors, timed: Profile | None) -> list[LayerCost]:
        """By which the model is cut, as a run would cut it."""
        how = self._settings.pipeline.cost
        try:
            if how != "profile":
                return layer_costs(self._builders, inputs, how)
            return (timed or self._run(inputs, targets, torch.device("cpu"))).costs
        except CostError as error:
            raise ConfigurationError(str(error)) from error

    def _time(
        self, layers: Sequence[LayerFacts], loss: LayerFacts | None, inputs: Tensors, targets: Tensors, notes: list[str]
    ) -> Profile | None:
        """On the present machine layers and loss themselves are timed, as far as that takes seconds."""
        distinct = {id(facts): facts for facts in (*layers, *([] if loss is None else [loss]))}
        estimated = sum(self._clock.estimate(facts).total for facts in distinct.values())
        if estimated > LONGEST_PROFILE:
            notes.append("layers are too large to be timed here: times follow from the machine's measured rates")
            return None
        try:
            timed = self._run(inputs, targets, torch.device("cuda" if self._kernels != "cpu" else "cpu"))
        except (CostError, RuntimeError) as error:
            notes.append(f"layers could not be timed here ({error}): times follow from the machine's measured rates")
            return None
        self._clock.measured.update({id(facts): times for facts, times in zip(layers, timed.times, strict=True)})
        if loss is not None and timed.loss is not None:
            self._clock.measured[id(loss)] = timed.loss
        return timed

    def _run(self, inputs: Tensors, targets: Tensors, device: torch.device) -> Profile:
        autocast = build_autocast(self._settings.precision, device)
        given, wanted = (tuple(_with_values(tensor, device) for tensor in side) for side in (inputs, targets))
        beside = self._other_workers.busy() if device.type == "cpu" else nullcontext()
        with as_worker(self._settings.pipeline.threads), beside:
            return profile_layers(
                self._builders, given, device, autocast, lambda outputs: self._task.loss(outputs, wanted)[0], wanted
            )


def _other_workers(pipeline: PipelineConfig) -> Neighbours:
    """Workers of a CPU share the machine with each other, which they feel: as many as compute at the same time."""
    at_once = min(pipeline.planned_workers * pipeline.replicas, usable_cores() // pipeline.threads)
    return Neighbours(max(0, at_once - 1), pipeline.threads)


def _with_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Ones, which may stand for tokens, labels and pixels."""
    return torch.ones_like(tensor, device=device)
