"""Trains without the engine: all layers in one process, one after the other, as `nn.Sequential` would run them.

It shares with the pipeline what defines the run (the layers, the task, the optimizer, the data, where random numbers
come from), and nothing of how the pipeline runs it: no cells, no schedule, no recompute, torch's own BatchNorm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Settings
from ..factory.build import build_autocast, build_lr_schedule, build_optimizer
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch, Tensors
from ..pipeline.boundary import as_tensors
from ..pipeline.cell import build_layer
from ..pipeline.randomness import NoiseSource, generator_states
from ..tasks.base import Task
from .batchnorm import run_together
from .record import (
    OUTPUT,
    WEIGHTS,
    Key,
    LayerTrace,
    StepState,
    copied,
    modules_of,
    named,
    named_buffers,
    optimizer_state,
)


@dataclass
class PooledStatistics:
    """Sums up one BatchNorm's inputs over a mini-batch, in float64.

    Attributes:
        count: values per channel.
        sums, squares: per channel, of the values and of their squares.
    """

    count: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Adds an input of shape (n, C, …)."""
        values = x.detach().double().transpose(0, 1).flatten(1)
        self.count += values.shape[1]
        self.sums = self.sums.to(values.device) + values.sum(1)
        self.squares = self.squares.to(values.device) + values.square().sum(1)


Place = tuple[int, int]  # (replica, micro-batch)


class Together(Enum):
    """Lists which micro-batches of a mini-batch BatchNorm normalises as one."""

    NOTHING = "each micro-batch by itself"
    REPLICAS = "the same micro-batch of all replicas (pipeline.sync_batchnorm)"
    EVERYTHING = "the whole mini-batch, as with M = 1"

    def groups(self, replicas: int, order: Sequence[int]) -> list[list[list[Place]]]:
        """Returns the sums of gradients that are computed apart and then added: of each, the groups, in order."""
        if self is Together.EVERYTHING:
            return [[[(replica, number) for replica in range(replicas) for number in order]]]
        if self is Together.REPLICAS:
            return [[[(replica, number) for replica in range(replicas)] for number in order]]
        return [[[(replica, number)] for number in order] for replica in range(replicas)]


@dataclass
class _Run:
    """Holds the state of one mini-batch."""

    step: int
    micro_batches: Sequence[Sequence[MicroBatch]]
    scale: float
    seen: LayerTrace
    losses: dict[Place, float] = field(default_factory=dict)


class PlainTraining:
    """Holds the plain model and its optimizer, and runs one step at a time.

    Args:
        builders: of all layers.
        settings: of the run.
        task: for the loss.
        device: where it runs.
    """

    def __init__(self, builders: Sequence[LayerBuilder], settings: Settings, task: Task, device: torch.device) -> None:
        self._settings, self._task, self._device = settings, task, device
        self.layers = [
            (index, builder.name, build_layer(builder, index, settings.seed, device))
            for index, builder in enumerate(builders)
        ]
        self.parameters = dict(named(self.layers))
        for _, _, module in self.layers:
            module.train(True)
        own = list({id(p): p for p in self.parameters.values()}.values())
        self._optimizer = build_optimizer(settings.optimizer, own)
        self._lr_schedule = build_lr_schedule(settings.lr_schedule, self._optimizer)
        self._autocast: Callable[[], AbstractContextManager[Any]] = build_autocast(settings.precision, device)
        self._batchnorms = modules_of(_BatchNorm, self.layers)
        self._statistics: dict[Key, PooledStatistics] = {}
        for key, batchnorm in self._batchnorms.items():
            batchnorm.register_forward_pre_hook(partial(self._gather_input, key))
        self.draws_noise: set[int] = set()  # layers that have drawn random numbers

    @property
    def batchnorms(self) -> int:
        """Returns the number of BatchNorm layers."""
        return len(self._batchnorms)

    def held(self) -> StepState:
        """Returns copies of weights and buffers."""
        return StepState(weights=copied(self.parameters), buffers=copied(named_buffers(self.layers)))

    @torch.no_grad()
    def load(self, state: StepState) -> None:
        """Loads weights and buffers."""
        buffers = named_buffers(self.layers)
        for key, tensor in {**state.weights, **state.buffers}.items():
            (self.parameters.get(key) if key in self.parameters else buffers[key]).copy_(tensor)  # type: ignore[union-attr]

    # -- forward and backward ----------------------------------------------------------------------------------------

    def gradients(
        self,
        step: int,
        micro_batches: Sequence[Sequence[MicroBatch]],
        order: Sequence[int],
        together: Together = Together.NOTHING,
    ) -> StepState:
        """Runs forward and backward of one mini-batch, and returns losses, gradients and traces.

        Args:
            step: number of the training step.
            micro_batches: of each replica, its micro-batches.
            order: in which the gradients of a replica's micro-batches are added up; it changes only the rounding.
            together: which micro-batches BatchNorm normalises as one.
        """
        weight = sum(self._task.weight(targets) for replica in micro_batches for _, targets in replica)
        run = _Run(step, micro_batches, 1 / weight if weight else 0.0, LayerTrace())
        self._statistics.clear()
        self._begin_step(step)
        with _frozen_averages(self._batchnorms.values()):
            totals = [self._add_up(run, group) for group in together.groups(len(micro_batches), order)]
        total = totals[0]
        for other in totals[1:]:
            total = {key: total[key] + gradient for key, gradient in other.items()}
        return StepState(
            loss=sum(run.losses[key] for key in sorted(run.losses)) / weight if weight else 0.0,
            losses=run.losses,
            gradient_norm=_norm(total.values()),
            gradients=copied(total),
            counted={key: float(statistics.count) for key, statistics in self._statistics.items()},
            trace=run.seen.trace,
        )

    def _begin_step(self, step: int) -> None:
        for module in (module for _, _, layer in self.layers for module in layer.modules()):
            begin_step: Any = getattr(module, "begin_step", None)
            if begin_step is not None:
                begin_step(step, self._settings.trainer.steps or 0)

    def _add_up(self, run: _Run, groups: Sequence[Sequence[Place]]) -> dict[Key, Tensor]:
        """Returns the sum of the gradients of micro-batches, with BatchNorm over each of the ``groups`` as one."""
        for group in groups:
            forwards = [partial(self._forward, run, place) for place in group]
            if len(forwards) == 1:
                losses = forwards[0]()
            else:
                apart = run_together(forwards, self._batchnorms.values(), self._device)
                losses = [loss for of_one in apart for loss in of_one]
            roots = [loss for loss in losses if loss.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.full_like(root, run.scale) for root in roots])
        return self._take_gradients()

    def _forward(self, run: _Run, place: Place) -> list[Tensor]:
        """Runs all layers for one micro-batch; returns its unscaled losses, those of layers and last the task's."""
        replica, number = place
        inputs, targets = (
            tuple(tensor.to(self._device) for tensor in side) for side in run.micro_batches[replica][number]
        )
        noise = NoiseSource(self._settings.seed, replica, self._device)
        values: Tensors = inputs
        losses: list[Tensor] = []
        with self._autocast():
            for index, _, module in self.layers:
                noise.seed_layer(run.step, number, index)
                before = generator_states(self._device)
                run.seen.weights(WEIGHTS, replica, number, index, module)
                returned = module(values if len(values) > 1 else values[0])
                outputs = as_tensors(returned)
                run.seen.outputs(OUTPUT, replica, number, index, outputs, values)
                auxiliary = getattr(module, "auxiliary_loss", None)
                if auxiliary is not None:
                    losses.append(auxiliary(returned, targets))
                if not all(map(torch.equal, before, generator_states(self._device))):
                    self.draws_noise.add(index)
                values = outputs
            losses.append(self._task.loss(values, targets)[0])
        run.losses[place] = sum(loss.item() for loss in losses)
        return losses

    def _take_gradients(self) -> dict[Key, Tensor]:
        """Returns the gradients of trainable parameters, zero where there is none, and resets them."""
        gradients = {}
        for key, parameter in self.parameters.items():
            if parameter.requires_grad:
                gradients[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients

    def _gather_input(self, key: Key, module: nn.Module, inputs: Any) -> None:
        self._statistics.setdefault(key, PooledStatistics()).add(inputs[0])

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, state: StepState, gradients: Mapping[Key, Tensor]) -> None:
        """Clips, updates weights, learning rate and BatchNorm's moving averages, and records the result in ``state``.

        Args:
            state: of the mini-batch, from `gradients`.
            gradients: for the update, unclipped: those of ``state``, or others.
        """
        norm, limit = _norm(gradients.values()), self._settings.trainer.gradient_clip
        factor = limit / norm if limit is not None and norm > limit else 1.0
        if math.isfinite(state.loss) and math.isfinite(norm):
            for key, parameter in self.parameters.items():
                if not parameter.requires_grad:
                    continue  # without a gradient, weight decay leaves it alone too
                gradient = gradients[key].to(self._device)
                parameter.grad = gradient * factor if factor != 1.0 else gradient.clone()
            self._optimizer.step()
            self._update_averages()
        self._lr_schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        after = self.held()
        state.weights, state.buffers = after.weights, after.buffers
        state.optimizer = copied(optimizer_state(self._optimizer, self.parameters))

    @torch.no_grad()
    def _update_averages(self) -> None:
        """Updates moving averages with mean and population variance of the mini-batch (paper, section 2.2)."""
        for key, statistics in self._statistics.items():
            batchnorm = self._batchnorms[key]
            if batchnorm.running_mean is None or batchnorm.running_var is None:
                continue
            assert batchnorm.num_batches_tracked is not None
            batchnorm.num_batches_tracked += 1
            momentum = batchnorm.momentum
            share = 1 / float(batchnorm.num_batches_tracked) if momentum is None else momentum
            mean = statistics.sums / statistics.count
            variance = statistics.squares / statistics.count - mean.square()
            for average, value in ((batchnorm.running_mean, mean), (batchnorm.running_var, variance)):
                average.copy_(average.double() * (1 - share) + value * share)


@contextmanager
def _frozen_averages(batchnorms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Keeps torch's BatchNorm from updating its moving averages, which it does with every micro-batch."""
    before = [(b, b.running_mean, b.running_var, b.num_batches_tracked) for b in batchnorms]
    for batchnorm, *_ in before:
        batchnorm.running_mean = batchnorm.running_var = batchnorm.num_batches_tracked = None
    try:
        yield
    finally:
        for batchnorm, mean, variance, count in before:
            batchnorm.running_mean, batchnorm.running_var, batchnorm.num_batches_tracked = mean, variance, count


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients))
