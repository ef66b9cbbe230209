"""Computes the gradients of a step without the engine: layer after layer, as `nn.Sequential` would run them.

It shares with the pipeline what defines the run (the layers, the task, the data), and nothing of how the pipeline runs
it: no schedule, no messages, torch's own BatchNorm, seeds of its own. So that it needs memory for one cell only, it
builds the layers of a cell, computes their outputs for all micro-batches, and forgets them; then it goes back from the
last cell to the first. Optimizers and learning-rate schedules are asked themselves, one parameter at a time and from
their beginning: no code that divides, sums, saves or resumes takes part.
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


@dataclass(frozen=True)
class MiniBatch:
    """Describes the arguments of a step.

    Attributes:
        step: its number, from 0.
        micro_batches: of each replica, in the order in which their gradients are added up, which changes only the
            rounding.
        loss_scale: factor of the loss in backward; the gradients of weights are divided by it in the end.
    """

    step: int
    micro_batches: Mapping[Place, MicroBatch]
    loss_scale: float = 1.0


@dataclass
class PlainStep:
    """Holds the results of a plain step that are not tensors of the model's size.

    Attributes:
        weight: of the mini-batch, by which its losses are divided.
        losses: unscaled sums by (replica, micro-batch).
        norms: of each parameter's gradient.
        batchnorms: layers that have one.
        outputs: fingerprints of what the layers returned.
    """

    weight: float
    losses: dict[Place, float] = field(default_factory=dict)
    norms: dict[Key, float] = field(default_factory=dict)
    batchnorms: set[int] = field(default_factory=set)
    outputs: dict[Point, Fingerprint] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses[key] for key in sorted(self.losses)) / self.weight if self.weight else 0.0

    @property
    def gradient_norm(self) -> float:
        return norm_of_all(self.norms[key] for key in sorted(self.norms))


Section = Mapping[str, Any]
Take = Callable[[Sequence[int], dict[Key, Tensor], dict[Key, Tensor]], None]  # a cell's layers, gradients, new buffers
Load = Callable[[int], Mapping[str, Tensor]]  # a layer's weights and buffers by full name; empty: as they are built


@dataclass(frozen=True)
class PlainModel:
    """Builds layers and runs steps, one cell at a time.

    Attributes:
        settings: of the run.
        task: for the loss.
        device: where it runs.
        cells: the layers of each cell.
        owners: of the tied parameters of later layers.
    """

    settings: Settings
    task: Task
    device: torch.device
    cells: Sequence[Sequence[int]]
    owners: Mapping[Key, Key]

    @torch.no_grad()
    def build(self, cell: Sequence[int], load: Load = lambda layer: {}, step: int = 0) -> _Cell:
        """Builds the layers of a cell, each under its own seed, with the weights and buffers that ``load`` returns.

        A tied parameter has its owner's value.

        Args:
            step: that they are told of (`begin_step`).
        """
        seed = self.settings.seed
        groups = Groups(self.settings.optimizer)
        builders, layers = groups.frozen_in(build_model(self.settings.model, seed)), []
        announce(builders[index] for index in cell)
        used: set[int] = set()
        for index in cell:
            with seeded(int.from_bytes(_digest((1, seed, index), 8), "little") // 2):
                module = builders[index].made()
            if not used.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                module = deepcopy(module)  # layers that share a module: each collects its own gradients
            used.update(map(id, (*module.parameters(), *module.buffers())))
            layers.append((index, builders[index].name, module.to(self.device)))
        built = _Cell(self, layers)
        held = built.held
        for index in cell:
            for name, tensor in load(index).items():
                held[index, name].copy_(tensor)
        for (index, name), (other, owner) in self.owners.items():
            if index in cell:
                value = load(other).get(owner)
                held[index, name].copy_(self.build([other], load).held[other, owner] if value is None else value)
        for part in built.modules():
            begin_step: Any = getattr(part, "begin_step", None)
            if begin_step is not None:
                begin_step(step, self.settings.trainer.steps or 0)
        return built

    def _summed(
        self, layers: Sequence[int], gradients: dict[Key, Tensor], waiting: dict[Key, dict[Key, Tensor]]
    ) -> dict[Key, Tensor]:
        """Returns a cell's gradients with those of all uses of its tied parameters.

        Args:
            layers: of the cell.
            waiting: of later uses, by their owner; gets those of this cell.
        """
        for key, owner in self.owners.items():
            if key in gradients:
                waiting.setdefault(owner, {})[key] = gradients.pop(key)
        for owner in [owner for owner in waiting if owner[0] in layers]:
            for _, gradient in sorted(waiting.pop(owner).items()):
                gradients[owner] = gradients[owner] + gradient if owner in gradients else gradient
        return gradients

    def run(self, mini_batch: MiniBatch, load: Load, take: Take) -> PlainStep:
        """Runs forward and backward of one mini-batch.

        Args:
            load: gives the weights and buffers before the step.
            take: called for each cell, from the last to the first; where nothing flowed back there is no gradient.
        """
        mini_batch, step = self._on_device(mini_batch)
        given: list[dict[Place, Tensors]] = [{place: inputs for place, (inputs, _) in mini_batch.micro_batches.items()}]
        for layers in self.cells[:-1]:
            cell = self.build(layers, load, mini_batch.step)
            given.append({place: _cut(cell.forward(mini_batch, place, x)[0]) for place, x in given[-1].items()})
        back: dict[Place, Sequence[Tensor | None]] = {}
        waiting: dict[Key, dict[Key, Tensor]] = {}
        for layers in reversed(self.cells):
            cell = self.build(layers, load, mini_batch.step)
            with averaged_over_a_mini_batch(cell):
                gradients, back = cell.forward_and_back(mini_batch, given.pop(), back, step)
            gradients = self._summed(layers, gradients, waiting)
            step.norms |= {key: float(torch.linalg.vector_norm(g, dtype=torch.float64)) for key, g in gradients.items()}
            take(layers, gradients, {key: held for key, held in cell.held.items() if key not in cell.weights})
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
        values = {place: inputs for place, (inputs, _) in mini_batch.micro_batches.items()}
        sums = []
        for layers in self.cells:
            cell = self.build(layers, load, mini_batch.step).eval()
            for place, (_, targets) in mini_batch.micro_batches.items():
                values[place] = cell.forward(mini_batch, place, values[place], step)[0]
                if layers is self.cells[-1]:
                    sums.append(self.task.evaluate(values[place], targets).cpu())
        totals = dict(zip(self.task.metrics, torch.stack(sums).sum(0).tolist(), strict=True)) if sums else {}
        return self.task.summarize(totals, step.weight) if step.weight else {}, step

    def _on_device(self, mini_batch: MiniBatch) -> tuple[MiniBatch, PlainStep]:
        def moved(tensors: Tensors) -> Tensors:
            return tuple(tensor.to(self.device) for tensor in tensors)

        pairs = {place: (moved(x), moved(y)) for place, (x, y) in mini_batch.micro_batches.items()}
        step = PlainStep(sum(self.task.weight(targets) for _, targets in pairs.values()))
        return MiniBatch(mini_batch.step, pairs, mini_batch.loss_scale), step


class _Cell(nn.Module):
    """Holds the layers of one cell, and runs them."""

    def __init__(self, model: PlainModel, layers: list[Layer]) -> None:
        super().__init__()
        self._layers, self._model, precision = layers, model, model.settings.precision
        self._parts = nn.ModuleList(module for _, _, module in layers)
        self._autocast = build_autocast(precision, model.device)
        self._boundary_type = boundary_type_of(precision)
        self.weights = {(layer[0], name): p for layer in layers for name, p in named(layer).items()}

    @property
    def held(self) -> dict[Key, Tensor]:
        """Returns weights and buffers."""
        buffers = {(layer[0], name): b for layer in self._layers for name, b in named_buffers(layer).items()}
        return {**self.weights, **buffers}

    def forward_and_back(
        self,
        mini_batch: MiniBatch,
        given: Mapping[Place, Tensors],
        back: Mapping[Place, Sequence[Tensor | None]],
        step: PlainStep,
    ) -> tuple[dict[Key, Tensor], dict[Place, Sequence[Tensor | None]]]:
        """Runs forward and backward of all micro-batches.

        Args:
            given: the inputs of the cell.
            back: the gradients of the outputs, None where nothing flowed back; empty behind the last cell.
            step: gets what is no gradient.

        Returns:
            The gradients of the parameters, and of the inputs.
        """
        for index, _, module in self._layers:
            if any(isinstance(part, _BatchNorm) for part in module.modules()):
                step.batchnorms.add(index)
        scale = mini_batch.loss_scale / step.weight if step.weight else 0.0
        gradients: dict[Key, Tensor] = {}
        for _, places in groupby(given, key=lambda place: place[0]):  # each replica adds up its own
            for place in places:
                outputs, losses = self.forward(mini_batch, place, given[place], step)
                step.losses[place] = step.losses.get(place, 0.0) + sum(loss.item() for loss in losses)
                arrived = zip(_trained(outputs), back[place], strict=True) if back else ()
                roots = [(output, gradient) for output, gradient in arrived if gradient is not None]
                roots += [(loss, torch.full_like(loss, scale)) for loss in losses if loss.requires_grad]
                if roots:
                    torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
            for key, parameter in self.weights.items():
                if (own := parameter.grad) is not None:
                    gradients[key], parameter.grad = gradients[key] + own if key in gradients else own, None
        gradients = {key: gradient / mini_batch.loss_scale for key, gradient in gradients.items()}
        return gradients, {place: [tensor.grad for tensor in _trained(tensors)] for place, tensors in given.items()}

    def forward(
        self, mini_batch: MiniBatch, place: Place, values: Tensors, step: PlainStep | None = None
    ) -> tuple[Tensors, list[Tensor]]:
        """Returns outputs and, in training, unscaled losses of one micro-batch; ``step`` gets what is seen of it."""
        model, losses = self._model, []
        targets, seed_of_run = mini_batch.micro_batches[place][1], model.settings.seed
        # In an evaluation: its first mini-batch.
        purpose = [2, seed_of_run, mini_batch.step] if self.training else [4, seed_of_run, 0, 0]
        with self._autocast():
            for index, _, module in self._layers:
                torch.manual_seed(seed := noise_seed(*purpose, *place, index))
                returned = module(as_argument(values))
                if step:
                    marks = enumerate(map(fingerprint, as_tensors(returned)))
                    step.outputs |= {Point(*place, index, number): mark for number, mark in marks}
                auxiliary = getattr(module, "auxiliary_loss", None)
                own = [auxiliary(returned, targets)] if auxiliary is not None and self.training else []
                made = [tensor for tensor in as_tensors(returned) if not any(tensor is one for one in values)]
                _seed_backward(seed, [*made, *own])
                losses += own
                is_last = index == model.cells[-1][-1]
                values = _as_passed_on(as_tensors(returned), values, None if is_last else self._boundary_type)
            if is_last and step and self.training:
                loss = model.task.loss(values, targets)[0]
                losses.append(loss if model.task.weight(targets) else torch.zeros_like(loss))
                _seed_backward(noise_seed(*purpose, *place, -1), losses[-1:])
        return values, losses


def _cut(tensors: Tensors) -> Tensors:
    """Returns leaves that collect a gradient where the tensors would."""
    return grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors), tensors)


def _seed_backward(seed: int, made: Sequence[Tensor]) -> None:
    """Seeds the random numbers of a layer's backward, which begins with the first gradient of what it has made."""
    left = [seed ^ 0x5DEECE66D]

    def begin(_: Tensor) -> None:
        if left:
            torch.manual_seed(left.pop())

    for tensor in made:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]  # torch's own


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


def update_seed(seed: int, update: int, parameter: str) -> int:
    """Returns the seed of the update, number ``update`` from 0, of the parameter of this full name."""
    name = int.from_bytes(blake2b(parameter.encode(), digest_size=8).digest(), "little", signed=True)
    return int.from_bytes(_digest((5, seed, update, name), 8), "little") // 2


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
    section: Section, key: GroupKey, rate: float | None, weight: Tensor, state: Section, gradient: Tensor, seed: int = 0
) -> tuple[Tensor, Any]:
    """Returns weight and state of a parameter after one update by the section `optimizer`, alone in one of its own.

    It is made on the weight's device, by the kernels of the run.

    Args:
        key: see `learning_rate`.
        rate: the learning rate.
        state: of the optimizer before, by name; empty before the first update.
        gradient: clipped.
        seed: of the random numbers that the optimizer draws.
    """
    parameter = nn.Parameter(weight.clone())
    alone, group = _alone(section, key, parameter)
    group |= {} if rate is None else {"lr": rate}
    for name, value in state.items():
        beside = isinstance(value, Tensor) and (value.dim() or group.get("fused") or group.get("capturable"))
        alone.state[parameter][name] = value.to(weight.device, copy=True) if beside else deepcopy(value)
    parameter.grad = gradient.clone()
    torch.manual_seed(seed)
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
