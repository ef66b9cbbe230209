"""Computes the gradients of a step without the engine: layer after layer, as `nn.Sequential` would run them.

It shares with the pipeline what defines the run (the layers, the task, the data), and nothing of how the pipeline runs
it: no schedule, no cells, no messages, no recompute, torch's own BatchNorm, seeds of its own. Optimizers and
learning-rate schedules are asked themselves, one parameter at a time and from their beginning: no code that divides,
sums, saves or resumes takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comparison.difference import Key, norm_of_all
from ..comparison.module_itself import averaged_over_a_mini_batch
from ..config import Settings
from ..cpu import seeded
from ..factory.build import boundary_type_of, build_autocast, build_lr_schedule, build_model, build_optimizer
from ..factory.groups import GroupKey, Groups
from ..layers import announce
from ..micro_batch import MicroBatch, Tensors
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like
from ..tasks.base import Task
from .record import Fingerprint, Layer, Place, Point, fingerprint, named, named_buffers

Section = Mapping[str, Any]
Load = Callable[[int], Mapping[str, Tensor]]  # returns a layer's weights and buffers by full name


@dataclass(frozen=True)
class MiniBatch:
    """Describes the arguments of a step.

    Attributes:
        step: its number, from 0.
        micro_batches: those of each replica, in the order in which their gradients are added up, which changes only
            the rounding.
        loss_scale: factor of the loss in backward; the gradients of weights are divided by it in the end.
    """

    step: int
    micro_batches: Mapping[Place, MicroBatch]
    loss_scale: float = 1.0


@dataclass
class PlainStep:
    """Holds the results of a plain step.

    Attributes:
        weight: weight of the mini-batch, by which its losses are divided.
        losses: unscaled sums by (replica, micro-batch).
        gradients: gradient of each parameter; a tied one has that of its owner. Where nothing flowed back is none.
        outputs: fingerprints of what the layers returned.
    """

    weight: float
    losses: dict[Place, float] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Point, Fingerprint] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses[key] for key in sorted(self.losses)) / self.weight if self.weight else 0.0

    @property
    def gradient_norm(self) -> float:
        norms = (torch.linalg.vector_norm(self.gradients[key], dtype=torch.float64) for key in sorted(self.gradients))
        return norm_of_all(map(float, norms))


class PlainModel:
    """Holds all layers of a run, and runs steps of them.

    Args:
        settings: configuration of the run.
        task: gives the loss.
        device: device on which it runs.
        owners: owner of each tied parameter of later layers.

    Attributes:
        weights: parameters by layer and full name.
        held: parameters and buffers, likewise.
        batchnorms: layers that have a BatchNorm.
    """

    def __init__(self, settings: Settings, task: Task, device: torch.device, owners: Mapping[Key, Key]) -> None:
        self.settings, self.task, self.device, self.owners = settings, task, device, owners
        self._layers = self._built()
        self._modules = nn.ModuleList(module for _, _, module in self._layers)
        self._autocast = build_autocast(settings.precision, device)
        self._boundary_type = boundary_type_of(settings.precision)
        self.weights = {(layer[0], name): p for layer in self._layers for name, p in named(layer).items()}
        buffers = {(layer[0], name): b for layer in self._layers for name, b in named_buffers(layer).items()}
        self.held: dict[Key, Tensor] = {**self.weights, **buffers}
        parts = ((index, part) for index, _, module in self._layers for part in module.modules())
        self.batchnorms = {index for index, part in parts if isinstance(part, _BatchNorm)}
        self._give_ties()

    def _built(self) -> list[Layer]:
        """Builds the layers, each under its own seed."""
        seed = self.settings.seed
        builders = Groups(self.settings.optimizer).frozen_in(build_model(self.settings.model, seed))
        announce(builders)
        layers: list[Layer] = []
        used: set[int] = set()
        for index, builder in enumerate(builders):
            with seeded(int.from_bytes(_digest((1, seed, index), 8), "little") // 2):
                module = builder.made()
            if not used.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                module = deepcopy(module)  # layers that share a module: each collects its own gradients
            used.update(map(id, (*module.parameters(), *module.buffers())))
            layers.append((index, builder.name, module.to(self.device)))
        return layers

    @torch.no_grad()
    def _give_ties(self) -> None:
        for key, owner in self.owners.items():
            self.held[key].copy_(self.held[owner])

    @torch.no_grad()
    def load(self, load: Load, step: int) -> None:
        """Takes weights and buffers, and tells the layers of the step (`begin_step`)."""
        for index, _, _ in self._layers:
            for name, tensor in load(index).items():
                self.held[index, name].copy_(tensor)
        self._give_ties()
        for part in self._modules.modules():
            begin_step: Any = getattr(part, "begin_step", None)
            if begin_step is not None:
                begin_step(step, self.settings.trainer.steps or 0)

    def run(self, mini_batch: MiniBatch, load: Load) -> PlainStep:
        """Runs forward and backward of one mini-batch; `held` then has its buffers after the step.

        Args:
            load: gives the weights and buffers before the step.
        """
        mini_batch, step = self._on_device(mini_batch)
        self.load(load, mini_batch.step)
        self._modules.train()
        scale = mini_batch.loss_scale / step.weight if step.weight else 0.0
        with averaged_over_a_mini_batch(self._modules):
            for _, places in groupby(mini_batch.micro_batches, key=lambda place: place[0]):  # each replica adds its own
                for place in places:
                    _, losses = self._forward(mini_batch, place, step)
                    step.losses[place] = sum(loss.item() for loss in losses)
                    roots = [loss for loss in losses if loss.requires_grad]
                    torch.autograd.backward(roots, [torch.full_like(loss, scale) for loss in roots])
                for key, parameter in self.weights.items():
                    if (own := parameter.grad) is not None:
                        before, parameter.grad = step.gradients.get(key), None
                        step.gradients[key] = own if before is None else before + own
        for key, owner in sorted(self.owners.items()):  # uses in layer order
            if (own := step.gradients.pop(key, None)) is not None:
                before = step.gradients.get(owner)
                step.gradients[owner] = own if before is None else before + own
        step.gradients = {key: gradient / mini_batch.loss_scale for key, gradient in step.gradients.items()}
        return step

    @torch.no_grad()
    def evaluate(self, mini_batch: MiniBatch, load: Load) -> tuple[dict[str, float], PlainStep]:
        """Evaluates micro-batches with the weights and buffers that ``load`` returns.

        Args:
            mini_batch: its step is the one before the evaluation; what `begin_step` has set lasts.

        Returns:
            The numbers, as the task summarizes them, and the layers' outputs.
        """
        mini_batch, step = self._on_device(mini_batch)
        self.load(load, mini_batch.step)
        self._modules.eval()
        sums = []
        for place, (_, targets) in mini_batch.micro_batches.items():
            outputs, _ = self._forward(mini_batch, place, step)
            sums.append(self.task.evaluate(outputs, targets).cpu())
        totals = dict(zip(self.task.metrics, torch.stack(sums).sum(0).tolist(), strict=True)) if sums else {}
        return self.task.summarize(totals, step.weight) if step.weight else {}, step

    def _on_device(self, mini_batch: MiniBatch) -> tuple[MiniBatch, PlainStep]:
        def moved(tensors: Tensors) -> Tensors:
            return tuple(tensor.to(self.device) for tensor in tensors)

        pairs = {place: (moved(x), moved(y)) for place, (x, y) in mini_batch.micro_batches.items()}
        step = PlainStep(sum(self.task.weight(targets) for _, targets in pairs.values()))
        return MiniBatch(mini_batch.step, pairs, mini_batch.loss_scale), step

    def _forward(self, mini_batch: MiniBatch, place: Place, step: PlainStep) -> tuple[Tensors, list[Tensor]]:
        """Returns outputs and, in training, unscaled losses of one micro-batch; ``step`` gets what is seen of it."""
        (values, targets), losses = mini_batch.micro_batches[place], list[Tensor]()
        training, seed_of_run = self._modules.training, self.settings.seed
        # In an evaluation: its first mini-batch.
        purpose = [2, seed_of_run, mini_batch.step] if training else [4, seed_of_run, 0, 0]
        with self._autocast():
            for index, _, module in self._layers:
                torch.manual_seed(seed := noise_seed(*purpose, *place, index))
                returned = module(as_argument(values))
                marks = enumerate(map(fingerprint, as_tensors(returned)))
                step.outputs |= {Point(*place, index, number): mark for number, mark in marks}
                auxiliary = getattr(module, "auxiliary_loss", None)
                own = [auxiliary(returned, targets)] if auxiliary is not None and training else []
                made = [tensor for tensor in as_tensors(returned) if not any(tensor is one for one in values)]
                _seed_backward(seed, [*made, *own])
                losses += own
                is_last = index == len(self._layers) - 1
                values = _as_passed_on(as_tensors(returned), values, None if is_last else self._boundary_type)
            if training:
                loss = self.task.loss(values, targets)[0]
                losses.append(loss if self.task.weight(targets) else torch.zeros_like(loss))
                _seed_backward(noise_seed(*purpose, *place, -1), losses[-1:])
        return values, losses


def _seed_backward(seed: int, made: Sequence[Tensor]) -> None:
    """Seeds the random numbers of a layer's backward, which begins with the first gradient of what it has made."""
    left = [seed ^ 0x5DEECE66D]

    def begin(_: Tensor) -> None:
        if left:
            torch.manual_seed(left.pop())

    for tensor in made:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]  # torch's own


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


# -- seeds, learning rate, update, average -----------------------------------------------------------------------------


def _digest(numbers: tuple[int, ...], size: int) -> bytes:
    return blake2b(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers), digest_size=size).digest()


def noise_seed(*place: int) -> int:
    """Returns the seed of a layer's noise: 63 bits that depend on all numbers of ``place`` (docs/design.md).

    Args:
        place: purpose, seed, step, replica, micro-batch, and the layer's number.
    """
    block, number = divmod(place[-1], 8)
    eight = _digest((*place[:-1], block), 64)
    return int.from_bytes(eight[8 * number : 8 * number + 8], "little") // 2


def learning_rate(optimizer: Section, lr_schedule: Section, n: int, key: GroupKey = ()) -> float | None:
    """Returns the learning rate of a parameter in update n = 1, 2, …; None where the optimizer has none.

    Args:
        key: the entries of `optimizer.groups` that apply to the parameter.
    """
    made, group = _alone(optimizer, key, nn.Parameter(torch.zeros(1, 1)))
    if "lr" not in group:
        return None
    schedule = build_lr_schedule(lr_schedule, made)
    for _ in range(n - 1):
        made.step()
        schedule.step()
    return float(group["lr"])


def update(
    section: Section, key: GroupKey, rate: float | None, weight: Tensor, state: Section, gradient: Tensor
) -> tuple[Tensor, Any]:
    """Returns weight and state of a parameter after one update by the section `optimizer`, alone in one of its own.

    It is made on the weight's device, by the kernels of the run.

    Args:
        key: see `learning_rate`.
        rate: the learning rate.
        state: the optimizer's state before, by name; empty before the first update.
        gradient: clipped.
    """
    parameter = nn.Parameter(weight.clone())
    alone, group = _alone(section, key, parameter)
    group |= {} if rate is None else {"lr": rate}
    for name, value in state.items():
        beside = isinstance(value, Tensor) and (value.dim() or group.get("fused") or group.get("capturable"))
        alone.state[parameter][name] = value.to(weight.device, copy=True) if beside else deepcopy(value)
    parameter.grad = gradient.clone()
    alone.step()
    return parameter.detach(), dict(alone.state[parameter])


def _alone(section: Section, key: GroupKey, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Returns an optimizer over one parameter, and the group that it is in."""
    made = build_optimizer(section, {key: [parameter]})
    return made, next(group for group in made.param_groups if group["params"])


def average(decay: float, updates: int, before: Tensor, weight: Tensor) -> Tensor:
    """Returns the moving average after an update, of the average before it and the weight after it.

    Args:
        decay: `trainer.average`.
        updates: before this one.
    """
    share = max(1 - decay, 9 / (10 + updates))
    return torch.lerp(before, weight.to(before), share)
