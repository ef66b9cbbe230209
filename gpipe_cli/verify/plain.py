"""Computes the gradients of a step without the engine: layer after layer, as `nn.Sequential` would run them.

It shares with the pipeline what defines the run (the layers, the task, the data), and nothing of how the pipeline runs
it: no schedule, no messages, torch's own BatchNorm, its own seeds (`reference.py`). So that it needs memory for one
cell only, it builds the layers of a cell, computes their outputs for all micro-batches, and forgets them; then it goes
back from the last cell to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Settings
from ..difference import Key, norm_of_all
from ..factory.build import boundary_type_of, build_autocast, build_model
from ..layers import announce
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.compare import averaged_over_a_mini_batch
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like
from ..pipeline.randomness import generator_states
from ..tasks.base import Task
from .record import (
    MODE,
    OUTPUT,
    Fingerprint,
    Place,
    Point,
    Recorder,
    Seen,
    fingerprint,
    mode_of,
    modules_of,
    named,
    named_buffers,
)
from .reference import noise_seed, weights_drawn


@dataclass(frozen=True)
class MiniBatch:
    """Describes what a step is given.

    Attributes:
        step: its number, from 0.
        micro_batches: of each replica.
        order: in which the gradients of a replica's micro-batches are added up; it changes only the rounding.
        loss_scale: factor of the loss in backward; the gradients of weights are divided by it in the end.
    """

    step: int
    micro_batches: Sequence[Sequence[MicroBatch]]
    order: Sequence[int]
    loss_scale: float = 1.0

    @property
    def places(self) -> list[list[Place]]:
        """Returns the places of each replica, whose gradients are added up apart, in order."""
        return [[(replica, number) for number in self.order] for replica in range(len(self.micro_batches))]


@dataclass
class PlainStep:
    """Holds the results of a plain step that are not tensors of the model's size.

    Attributes:
        weight: of the mini-batch, by which its losses are divided.
        losses: unscaled sums by (replica, micro-batch).
        statistics: sums of the task's statistics.
        norms: of each parameter's gradient.
        batchnorms: that have run, by layer and name.
        seen: of the layers, as in `record.py`.
        used: fingerprints of weights, by layer and their number in it, in each type that they are used in: by its name.
        draws_noise: layers that have drawn random numbers.
    """

    weight: float
    losses: dict[Place, float] = field(default_factory=dict)
    statistics: Tensor | None = None
    norms: dict[Key, float] = field(default_factory=dict)
    batchnorms: set[Key] = field(default_factory=set)
    seen: Seen = field(default_factory=dict)
    used: dict[tuple[int, int], dict[str, Fingerprint]] = field(default_factory=dict)
    draws_noise: set[int] = field(default_factory=set)

    @property
    def loss(self) -> float:
        return sum(self.losses[key] for key in sorted(self.losses)) / self.weight if self.weight else 0.0

    def weight_used(self, point: Point, used: Fingerprint) -> Fingerprint:
        """Returns the fingerprint of the weight at ``point`` in the type in which it was ``used``, or in its own."""
        types = self.used[point.layer, point.number]
        return types.get(used.dtype, next(iter(types.values())))

    @property
    def gradient_norm(self) -> float:
        return norm_of_all(self.norms[key] for key in sorted(self.norms))


Take = Callable[[int, dict[Key, Tensor], dict[Key, Tensor]], None]  # a cell, its gradients, its buffers after the step
Load = Callable[[int], Mapping[str, Tensor]]  # a layer's weights and buffers by full name; empty: as they are built


class PlainModel:
    """Builds layers and runs steps, one cell at a time.

    Args:
        settings: of the run.
        task: for the loss.
        device: where it runs.
        cells: the layers of each cell.
        owners: of the tied parameters of later layers.
    """

    def __init__(
        self,
        settings: Settings,
        task: Task,
        device: torch.device,
        cells: Sequence[Sequence[int]],
        owners: Mapping[Key, Key],
    ) -> None:
        self._settings, self.task, self.device, self.cells, self.owners = settings, task, device, cells, owners
        self.autocast: Callable[[], AbstractContextManager[Any]] = build_autocast(settings.precision, device)
        self._boundary_type, self.last, self.seed = boundary_type_of(settings.precision), cells[-1][-1], settings.seed
        autocast = settings.precision.autocast
        self.half: torch.dtype | None = None if autocast is None else getattr(torch, autocast)
        self.steps = settings.trainer.steps or 0

    @torch.no_grad()
    def build(self, cell: Sequence[int], load: Load = lambda layer: {}) -> _Built:
        """Builds the layers of a cell, each under its own seed, with the weights and buffers that ``load`` returns.

        A tied parameter has its owner's value.
        """
        builders, layers = build_model(self._settings.model, self._settings.seed), []
        announce(builders[index] for index in cell)
        used: set[int] = set()
        for index in cell:
            with weights_drawn(self._settings.seed, index):
                module = builders[index].build()
            if not used.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                module = deepcopy(module)  # layers that share a module: each collects its own gradients
            used.update(map(id, (*module.parameters(), *module.buffers())))
            layers.append((index, builders[index].name, module.to(self.device).train()))
        built = _Built(layers)
        held = built.held
        for index in cell:
            for name, tensor in load(index).items():
                held[index, name].copy_(tensor)
        for (index, name), (other, owner) in self.owners.items():
            if index in cell:
                value = load(other).get(owner)
                held[index, name].copy_(self.build([other], load).held[other, owner] if value is None else value)
        return built

    def _summed(self, gradients: dict[Key, Tensor], waiting: dict[Key, dict[Key, Tensor]]) -> dict[Key, Tensor]:
        """Returns a cell's gradients with those of all uses of its tied parameters.

        Args:
            waiting: of later uses, by their owner; gets those of this cell.
        """
        for key, owner in self.owners.items():
            if key in gradients:
                waiting.setdefault(owner, {})[key] = gradients.pop(key)
        for owner in waiting.keys() & gradients.keys():
            later = waiting.pop(owner)
            for _, gradient in sorted(later.items()):
                gradients[owner] = gradients[owner] + gradient
        return gradients

    def run(self, mini_batch: MiniBatch, load: Load, take: Take) -> PlainStep:
        """Runs forward and backward of one mini-batch.

        Args:
            load: gives the weights and buffers before the step.
            take: called for each cell, from the last to the first, with zeros where nothing flowed back.
        """
        replicas = mini_batch.micro_batches
        step = PlainStep(sum(self.task.weight(targets) for replica in replicas for _, targets in replica))
        recorder, places = Recorder(), [place for of_replica in mini_batch.places for place in of_replica]
        given: list[dict[Place, Tensors]] = [
            {(r, m): tuple(t.to(self.device) for t in replicas[r][m][0]) for r, m in places}
        ]
        for cell in self.cells[:-1]:
            run = _CellRun(self, self.build(cell, load), mini_batch, step, given[-1])
            given.append({place: _cut(run.forward(place)[0]) for place in places})
        back: dict[Place, Tensors] = {}
        waiting: dict[Key, dict[Key, Tensor]] = {}
        for number in reversed(range(len(self.cells))):
            run = _CellRun(self, self.build(self.cells[number], load), mini_batch, step, given.pop(), recorder)
            with averaged_over_a_mini_batch(run.built.module):
                gradients, back = run.forward_and_back(back)
            step.batchnorms |= run.built.batchnorms
            gradients = self._summed(gradients, waiting)
            step.norms |= {key: float(torch.linalg.vector_norm(g, dtype=torch.float64)) for key, g in gradients.items()}
            take(number, gradients, named_buffers(run.built.layers))
        step.seen = recorder.take()
        return step

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[Sequence[MicroBatch]], load: Load, step: int
    ) -> tuple[dict[str, float], Seen]:
        """Evaluates micro-batches, those of each replica, with the weights and buffers that ``load`` returns.

        Args:
            step: the one before the evaluation, from 0; what `begin_step` has set lasts.

        Returns:
            The numbers, as the task summarizes them, and fingerprints of the layers' outputs.
        """
        places = [(r, m) for r, replica in enumerate(micro_batches) for m in range(len(replica))]
        values = {(r, m): tuple(t.to(self.device) for t in micro_batches[r][m][0]) for r, m in places}
        recorder = Recorder()
        for cell in self.cells:
            built = self.build(cell, load)
            built.begin_step(step, self.steps)
            for index, _, module in built.layers:
                module.train(False)
                for place, given in values.items():
                    with self.autocast():
                        returned = as_tensors(module(as_argument(given)))
                    values[place] = _as_passed_on(returned, given, self.type_behind(index))
                    recorder.outputs(OUTPUT, (*place, index), returned, given)
        targets = {(r, m): tuple(t.to(self.device) for t in micro_batches[r][m][1]) for r, m in places}
        sums = [self.task.evaluate(values[place], targets[place]).cpu() for place in places]
        weight = sum(self.task.weight(micro_batches[r][m][1]) for r, m in places)
        totals = dict(zip(self.task.metrics, torch.stack(sums).sum(0).tolist(), strict=True)) if sums else {}
        return self.task.summarize(totals, weight) if weight else {}, recorder.take()

    def type_behind(self, layer: int) -> torch.dtype | None:
        """Returns the type of the tensors between this layer and the next; None: as the layer returns them."""
        return None if layer == self.last else self._boundary_type


class _Built:
    """Holds the layers of one cell."""

    def __init__(self, layers: list[tuple[int, str, nn.Module]]) -> None:
        self.layers = layers
        self.parameters = dict(named(layers))
        self.module = nn.ModuleList(module for _, _, module in layers)
        self.batchnorms = modules_of(_BatchNorm, layers).keys()

    @property
    def held(self) -> dict[Key, Tensor]:
        """Returns weights and buffers."""
        return {**self.parameters, **named_buffers(self.layers)}

    def begin_step(self, step: int, steps: int) -> None:
        for module in (module for _, _, layer in self.layers for module in layer.modules()):
            begin_step: Any = getattr(module, "begin_step", None)
            if begin_step is not None:
                begin_step(step, steps)

    def fingerprint_weights(self, step: PlainStep, half: torch.dtype | None) -> None:
        """Takes the fingerprints of the weights, and of their casts where autocast casts to ``half``."""
        for index, _, module in self.layers:
            for number, weight in enumerate(module.parameters()):
                marks = [fingerprint(weight.to(dtype)) for dtype in (weight.dtype, half) if dtype is not None]
                step.used[index, number] = {mark.dtype: mark for mark in marks}

    def take_gradients(self) -> dict[Key, Tensor]:
        """Returns the gradients of trainable parameters, zero where there is none, and resets them."""
        gradients = {}
        for key, parameter in self.parameters.items():
            if parameter.requires_grad:
                gradients[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients


@dataclass
class _CellRun:
    """Runs one cell for all micro-batches of one mini-batch."""

    model: PlainModel
    built: _Built
    mini_batch: MiniBatch
    step: PlainStep
    given: dict[Place, Tensors]  # the inputs of the cell
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.built.begin_step(self.mini_batch.step, self.model.steps)

    def forward_and_back(self, back: Mapping[Place, Tensors]) -> tuple[dict[Key, Tensor], dict[Place, Tensors]]:
        """Runs forward and backward.

        Args:
            back: the gradients of the outputs; empty behind the last cell.

        Returns:
            The gradients of the parameters, and of the inputs.
        """
        self.built.fingerprint_weights(self.step, self.model.half)
        scale = self.mini_batch.loss_scale / self.step.weight if self.step.weight else 0.0
        totals: list[dict[Key, Tensor]] = []
        for places in self.mini_batch.places:
            for place in places:
                outputs, losses = self.forward(place)
                roots = [*zip(_trained(outputs), back[place], strict=True)] if back else []
                roots += [(loss, torch.full_like(loss, scale)) for loss in losses if loss.requires_grad]
                if roots:
                    torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
            totals.append(self.built.take_gradients())
        gradients = totals[0]
        for other in totals[1:]:
            gradients = {key: gradients[key] + gradient for key, gradient in other.items()}
        gradients = {key: gradient / self.mini_batch.loss_scale for key, gradient in gradients.items()}
        return gradients, {
            place: tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in _trained(tensors))
            for place, tensors in self.given.items()
        }

    def forward(self, place: Place) -> tuple[Tensors, list[Tensor]]:
        """Returns outputs and unscaled losses of one micro-batch."""
        replica, number = place
        targets = tuple(tensor.to(self.model.device) for tensor in self.mini_batch.micro_batches[replica][number][1])
        values, losses = self.given[place], []
        with torch.enable_grad(), self.model.autocast():
            for index, _, module in self.built.layers:
                torch.manual_seed(noise_seed(self.model.seed, self.mini_batch.step, replica, number, index))
                before = generator_states(self.model.device)
                call = replica, number, index
                if self.recorder:
                    self.recorder.note(MODE, call, mode_of(module, self.model.device))
                returned = module(as_argument(values))
                outputs = _as_passed_on(as_tensors(returned), values, self.model.type_behind(index))
                if self.recorder:
                    self.recorder.outputs(OUTPUT, call, as_tensors(returned), values)
                auxiliary = getattr(module, "auxiliary_loss", None)
                if auxiliary is not None:
                    losses.append(auxiliary(returned, targets))
                if not all(map(torch.equal, before, generator_states(self.model.device))):
                    self.step.draws_noise.add(index)
                values = outputs
            if index == self.model.last:
                loss, statistics = self.model.task.loss(values, targets)
                losses.append(loss)
        if self.recorder:
            if index == self.model.last:
                seen = self.step.statistics
                self.step.statistics = statistics.double().cpu() + (0.0 if seen is None else seen)
            self.step.losses[place] = self.step.losses.get(place, 0.0) + sum(loss.item() for loss in losses)
        return values, losses


def _cut(tensors: Tensors) -> Tensors:
    """Returns leaves that collect a gradient where the tensors would."""
    return grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors), tensors)


def _trained(tensors: Tensors) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _as_passed_on(outputs: Tensors, inputs: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Returns a layer's outputs as the next gets them; ``dtype``: of those that it has made, None: their own."""

    def cast(tensor: Tensor) -> Tensor:
        changes = dtype is not None and tensor.is_floating_point() and not any(tensor is one for one in inputs)
        return tensor.to(dtype) if changes else tensor

    return grouped_like((_plainly_laid_out(cast(tensor)) for tensor in outputs), outputs)


def _plainly_laid_out(tensor: Tensor) -> Tensor:
    """Returns the values in an order of memory that every tensor may have, as a file or a message would keep them.

    Kernels choose their order of summation by it, so a difference would be one of rounding. Its gradient gets the same.
    """
    by_channel = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    made = tensor if by_channel or tensor.is_contiguous() else tensor.contiguous()
    order = torch.contiguous_format if made.is_contiguous() else torch.channels_last
    if made.requires_grad:
        lay_out = partial(Tensor.contiguous, memory_format=order)
        made.register_hook(lay_out)  # type: ignore[no-untyped-call]  # torch's own
    return made
