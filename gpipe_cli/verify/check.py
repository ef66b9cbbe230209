"""Checks recorded steps of the pipeline against the plain model and its update, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before has found to be
right. So rounding does not add up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comparison.difference import NO_LAYER, Key, Quantity, measure
from ..config import Settings
from ..factory.groups import Groups
from ..layers import own_name
from . import compare as c
from .compare import Gaps
from .plain import MiniBatch, PlainModel, PlainStep, learning_rate, update
from .record import AGAIN, OUTPUT, RecordedStep, Spill

MINI_BATCH, ALL_PARAMETERS = (NO_LAYER, "mini-batch"), (NO_LAYER, "all parameters")


@dataclass
class Checker:
    """Checks steps of a run.

    Attributes:
        settings: configuration of the run.
        names, places: name and place of each layer, as ``conv`` and ``layer conv (cell 0)``.
        model: the plain one.
        spill: what the workers have written.
        tolerance: the largest relative difference that counts as rounding.
        repeated: the same of an output that is computed again.
    """

    settings: Settings
    names: Sequence[str]
    places: Sequence[str]
    model: PlainModel
    spill: Spill
    tolerance: float
    repeated: float

    def step(self, number: int, record: RecordedStep, mini_batch: MiniBatch) -> list[Quantity]:
        """Checks one step, number 1 being the first. A step that was skipped must have changed nothing."""
        plain = self.model.run(mini_batch, lambda layer: self._held(number - 1, layer, "weight", "buffer"))
        gaps: dict[str, Gaps] = defaultdict(dict)
        owned: dict[Key, Tensor] = {}  # expected values of tied parameters
        for layer in range(len(self.names)):
            self._measure_layer(gaps, number, layer, plain, record)
            self._measure_update(gaps, number, layer, record, owned)
        for moment in (f"held {number - 1}", f"gradients {number}"):
            self.spill.drop(moment)
        tolerance = self.tolerance
        return [
            *self._of_forward(record, plain),
            c.numbers(c.LOSS, {MINI_BATCH: record.loss}, {MINI_BATCH: plain.loss}, tolerance),
            c.numbers(c.NORM, {ALL_PARAMETERS: record.gradient_norm}, {ALL_PARAMETERS: plain.gradient_norm}, tolerance),
            c.tensors(c.GRADIENTS, gaps[c.GRADIENTS], tolerance),
            c.tensors(c.STATE, gaps[c.STATE], tolerance),
            *(c.tensors(name, gaps[name], tolerance, changes=True) for name in (c.BUFFERS, c.UPDATED)),
        ]

    def _held(self, number: int, layer: int, *kinds: str) -> dict[str, Tensor]:
        return self.spill.get(f"held {number}", layer, *kinds)

    def _of_forward(self, ours: RecordedStep, plain: PlainStep) -> list[Quantity]:
        names, tolerance = self.names, self.tolerance
        first, again = ours.seen.get(OUTPUT, {}), ours.seen.get(AGAIN, {})
        beside = [(point, first.get(point), mark) for point, mark in plain.outputs.items()]
        repeated = [(point, mark, first[point]) for point, mark in again.items() if point in first]
        return [
            c.numbers(c.LOSSES, _by_place(ours.losses), _by_place(plain.losses), tolerance),
            c.traces(c.OUTPUTS, beside, names, tolerance),
            c.traces(c.AGAIN, repeated, names, self.repeated),
        ]

    def _measure_layer(
        self, gaps: dict[str, Gaps], number: int, layer: int, plain: PlainStep, record: RecordedStep
    ) -> None:
        """Measures gradients and buffers; gradients that one side alone has are differences."""
        ours = self.spill.get(f"gradients {number}", layer)
        now, old = (self._held(n, layer, "buffer") for n in (number, number - 1))
        for key, held in self.model.held.items():
            name = key[1]
            if key[0] != layer:
                continue
            if key not in self.model.weights:
                gaps[c.BUFFERS][key] = measure(now.get(name), held if record.finite else old[name], old.get(name))
            elif record.finite and (name in ours or key in plain.gradients):
                gaps[c.GRADIENTS][key] = measure(ours.get(name), plain.gradients.get(key))

    def _measure_update(
        self, gaps: dict[str, Gaps], number: int, layer: int, record: RecordedStep, owned: dict[Key, Tensor]
    ) -> None:
        """Measures each parameter and its state after the update by the pipeline's own gradients, clipped."""
        optimizer, limit, norm = self.settings.optimizer, self.settings.trainer.gradient_clip, record.gradient_norm
        factor = limit / norm if limit is not None and norm > limit else 1.0
        groups, of_layer = Groups(optimizer), self.names[layer]
        old, new = (self._held(n, layer) for n in (number - 1, number))
        gradients = self.spill.get(f"gradients {number}", layer) if record.finite else {}
        for name, weight in self._held(number - 1, layer, "weight").items():
            owner = self.model.owners.get((layer, name))
            if owner is not None:
                gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), owned[owner], weight)
                continue
            right, state = weight, _state_of(old, name)
            if name in gradients:
                group = groups.key(own_name(of_layer, name.removeprefix(f"{of_layer}.")), weight.shape)
                rate = learning_rate(optimizer, self.settings.lr_schedule, number, group)
                gradient, on = gradients[name] * factor, self.model.device
                right, state = update(optimizer, group, rate, weight.to(on), state, gradient.to(on))
            gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), right, weight)
            owned[layer, name] = right
            for kind, value in state.items():
                if isinstance(value, (Tensor, int, float)):
                    key = f"{name}:{kind}"
                    gaps[c.STATE][layer, key] = measure(new.get(f"state/{key}"), torch.as_tensor(value))


def _by_place(losses: Mapping[tuple[int, int], float]) -> dict[Key, float]:
    return {(NO_LAYER, f"replica {r}, micro-batch {m}"): loss for (r, m), loss in losses.items()}


def _state_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Returns the optimizer's state of a parameter, of what `Spill` holds of its layer."""
    prefix = f"state/{name}:"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
