"""Computes the gradients of a step without the engine: layer after layer, as `nn.Sequential` would run them.

It shares with the pipeline what defines the run (the layers, the task, the data, seeds of noise, the layout of what
passes between layers), and nothing of how the pipeline runs it: no schedule, no cells, no messages, no recompute,
torch's own BatchNorm. One optimizer and one learning-rate schedule update all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comparison.difference import Key
from ..comparison.module_itself import averaged_over_a_mini_batch
from ..config import Settings
from ..distributed.pipeline import unshared
from ..factory.build import boundary_type_of, build_autocast, build_lr_schedule, build_model, build_optimizer
from ..factory.groups import Groups
from ..layers import announce, own_name
from ..micro_batch import MicroBatch
from ..pipeline.cell import BuiltLayer, build_layer
from ..pipeline.engine import TASK
from ..pipeline.messages.boundary import (
    as_argument,
    as_tensors,
    canonical,
    canonical_gradient,
    grouped_like,
    is_channels_last,
    passed_on,
)
from ..pipeline.randomness import NoiseSource
from ..tasks.base import Task
from .record import Fingerprint, Place, Point, fingerprint, held_by, named, named_buffers

Load = Callable[[int], Mapping[str, Tensor]]  # index of a layer -> what it holds, see `held_by`


@dataclass
class PlainStep:
    """Holds the results of a plain step.

    Attributes:
        weight: weight of the mini-batch, by which its losses are divided.
        losses: unscaled sums by (replica, micro-batch).
        gradients: gradient of each parameter that got one. Those of tied parameters are added to their owner's.
        outputs: fingerprints of what the layers returned.
    """

    weight: float
    losses: dict[Place, float] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Point, Fingerprint] = field(default_factory=dict)

    def add_gradient(self, key: Key, gradient: Tensor | None) -> None:
        """Adds the gradient of one replica, or of one use, to those of a parameter; None: there is none."""
        if gradient is not None:
            before = self.gradients.get(key)
            self.gradients[key] = gradient if before is None else before + gradient

    @property
    def loss(self) -> float:
        """Returns the loss of the mini-batch, per unit of weight."""
        return sum(self.losses[key] for key in sorted(self.losses)) / self.weight if self.weight else 0.0

    @property
    def gradient_norm(self) -> float:
        """Returns the norm of all gradients together."""
        norms = [torch.linalg.vector_norm(self.gradients[key], dtype=torch.float64) for key in sorted(self.gradients)]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


class PlainModel:
    """Holds all layers of a run, and runs steps of them.

    Args:
        settings: configuration of the run.
        task: gives the loss.
        device: device on which it runs.
        owners: tied parameter -> its owner in an earlier layer.

    Attributes:
        weights: parameters by (index of the layer, name in the model).
        held: parameters and buffers by the same.
        batchnorms: layers that have a BatchNorm.
    """

    def __init__(self, settings: Settings, task: Task, device: torch.device, owners: Mapping[Key, Key]) -> None:
        self.settings, self.task, self.device, self.owners = settings, task, device, owners
        self._layers = self._built()
        self._modules = nn.ModuleList(layer.module for layer in self._layers)
        self._autocast = build_autocast(settings.precision, device)
        self._boundary_type = boundary_type_of(settings.precision)
        self.weights = {(layer.index, name): p for layer in self._layers for name, p in named(layer).items()}
        buffers = {(layer.index, name): b for layer in self._layers for name, b in named_buffers(layer).items()}
        self.held: dict[Key, Tensor] = {**self.weights, **buffers}
        parts = ((layer.index, part) for layer in self._layers for part in layer.module.modules())
        self.batchnorms = {index for index, part in parts if isinstance(part, _BatchNorm)}
        self._give_ties()
        trained = [
            (own_name(layer.name, name), parameter)
            for layer in self._layers
            for name, parameter in layer.module.named_parameters()
            if parameter.requires_grad and (layer.index, f"{layer.name}.{name}") not in owners
        ]
        members = Groups(settings.optimizer).divided(trained)
        self._optimizer = build_optimizer(settings.optimizer, members, settings.seed)
        self._lr_schedule = build_lr_schedule(settings.lr_schedule, self._optimizer, settings.seed)

    def _built(self) -> list[BuiltLayer]:
        """Builds all layers, each with parameters of its own."""
        seed = self.settings.seed
        builders = Groups(self.settings.optimizer).frozen_in(build_model(self.settings.model, seed))
        announce(builders)
        used = set[int]()
        return [
            BuiltLayer(index, builder.name, unshared(build_layer(builder, index, seed, self.device), used))
            for index, builder in enumerate(builders)
        ]

    @torch.no_grad()
    def _give_ties(self) -> None:
        """Copies the value of each owner to the parameters that are tied to it."""
        for key, owner in self.owners.items():
            self.held[key].copy_(self.held[owner])

    @torch.no_grad()
    def load(self, load: Load, step: int) -> None:
        """Takes the weights and buffers before a step, and calls `begin_step` of the layers that have it."""
        for layer in self._layers:
            for full_name, tensor in load(layer.index).items():
                kind, _, name = full_name.partition("/")
                if kind != "state":
                    self.held[layer.index, name].copy_(tensor)
        self._give_ties()
        for part in self._modules.modules():
            begin_step: Any = getattr(part, "begin_step", None)
            if begin_step is not None:
                begin_step(step, self.settings.trainer.steps or 0)

    def run(self, number: int, micro_batches: Mapping[Place, MicroBatch], loss_scale: float, load: Load) -> PlainStep:
        """Runs forward and backward of one mini-batch; `held` then has its buffers after the step.

        Args:
            number: number of the step, from 0.
            micro_batches: those of each replica, in the order in which their gradients are added up, which changes only
                the rounding.
            loss_scale: factor of the loss in backward; the gradients of weights are divided by it in the end.
            load: gives the weights and buffers before the step.
        """
        step = PlainStep(sum(self.task.weight(targets) for _, targets in micro_batches.values()))
        self.load(load, number)
        self._modules.train()
        scale = loss_scale / step.weight if step.weight else 0.0
        with averaged_over_a_mini_batch(self._modules):
            for _, places in groupby(micro_batches, key=lambda place: place[0]):  # each replica adds its own
                for place in places:
                    losses = self._forward(number, place, micro_batches[place], step)
                    step.losses[place] = sum(loss.item() for loss in losses)
                    roots = [loss for loss in losses if loss.requires_grad]
                    torch.autograd.backward(roots, [torch.full_like(loss, scale) for loss in roots])
                for key, parameter in self.weights.items():
                    step.add_gradient(key, parameter.grad)
                    parameter.grad = None
        for key, owner in sorted(self.owners.items()):  # uses in layer order
            step.add_gradient(owner, step.gradients.pop(key, None))
        step.gradients = {key: gradient / loss_scale for key, gradient in step.gradients.items()}
        return step

    @torch.no_grad()
    def update(self, gradients: Mapping[Key, Tensor], factor: float | None) -> None:
        """Updates the weights by gradients times a factor (None: the update is skipped), and the learning rate."""
        if factor is not None:
            for key, gradient in gradients.items():
                self.weights[key].grad = gradient.to(self.device) * factor
            self._optimizer.step()
            self._give_ties()
        self._lr_schedule.step()
        self._modules.zero_grad()

    def holds(self, layer: int) -> dict[str, Tensor]:
        """Returns weights, buffers and optimizer state of a layer, by ``kind/name in the model``."""
        states: Mapping[Tensor, Any] = self._optimizer.state
        parameters = self._layers[layer].module.named_parameters()
        return held_by(self._layers[layer], {name: states[p] for name, p in parameters if p in states})

    def _forward(self, number: int, place: Place, pair: MicroBatch, step: PlainStep) -> list[Tensor]:
        """Returns the unscaled losses of one micro-batch: the layers' own, then the task's.

        ``step`` gets the fingerprints of the outputs.
        """
        values, targets = (tuple(tensor.to(self.device) for tensor in side) for side in pair)
        losses: list[Tensor] = []
        replica, micro_batch = place
        noise = NoiseSource(self.settings.seed, replica, self.device)
        *seeds, of_loss = noise.seeds(number, micro_batch, [*range(len(self._layers)), TASK])
        with self._autocast():
            for layer, seed in zip(self._layers, seeds, strict=True):
                noise.seed(seed)
                returned = layer.module(as_argument(values))
                outputs = as_tensors(returned)
                marks = [*map(fingerprint, outputs)]
                step.outputs |= {Point(*place, layer.index, number): mark for number, mark in enumerate(marks)}
                auxiliary = getattr(layer.module, "auxiliary_loss", None)
                own = [auxiliary(returned, targets)] if auxiliary is not None else []
                noise.seed_backward(seed, [*outputs, *own], values)
                losses += own
                dtype = None if layer is self._layers[-1] else self._boundary_type
                values = grouped_like(map(_laid_out, passed_on(outputs, values, dtype)), outputs)
            loss = self.task.loss(values, targets)[0]
            losses.append(loss if self.task.weight(targets) else torch.zeros_like(loss))
            noise.seed_backward(of_loss, losses[-1:])
        return losses


def _laid_out(tensor: Tensor) -> Tensor:
    """Returns a tensor in the memory layout of boundaries; its gradient gets that layout, too."""
    made = canonical(tensor)
    if made.requires_grad:
        lay_out = partial(canonical_gradient, of_channels_last=is_channels_last(made))
        made.register_hook(lay_out)  # type: ignore[no-untyped-call]  # torch's own
    return made
