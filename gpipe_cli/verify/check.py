"""Checks recorded steps of the pipeline against the plain model and its update, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before (or of the
beginning) has found to be right. So any step can be checked, and rounding does not add up.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..comparison.difference import NO_LAYER, Difference, Key, Quantity, judge, measure
from ..config import Settings
from ..factory.groups import Groups
from ..layers import own_name
from . import compare as c
from .compare import Gaps
from .plain import Load, MiniBatch, PlainModel, PlainStep, average, learning_rate, update
from .record import AGAIN, HELD, OUTPUT, Fingerprint, Point, RecordedStep, Seen, Spill

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

    def _load(self, moment: str, *more: str) -> Load:
        """Returns the weights and buffers of a moment, as a function of the layer; ``more``: what replaces them."""
        return lambda layer: self.spill.get(moment, layer, "weight", "buffer", *more)

    # -- beginning, skipped steps, resume ------------------------------------------------------------------------------

    def beginning(self, moment: str) -> list[Quantity]:
        """Checks the weights and buffers before the first step: freshly drawn, unless the run is given others."""
        gaps: Gaps = {}
        if self.settings.checkpoint.init_from is not None:
            return []
        for layer in range(len(self.names)):
            ours = self._load(moment)(layer)
            for key, tensor in self.model.held.items():
                if key[0] == layer:
                    gaps[key] = measure(ours.get(key[1]), tensor)
        return [c.tensors(c.BEGIN, gaps, self.tolerance * 1e-3)]

    def unchanged(self, name: str, before: str, after: str) -> list[Quantity]:
        """Checks that the workers held equal tensors at two moments, bit for bit."""
        gaps: Gaps = {}
        for layer in range(len(self.names)):
            old, new = self.spill.get(before, layer), self.spill.get(after, layer)
            for key in {*old, *new}:
                gaps[layer, key] = measure(new.get(key), old.get(key))
        return [c.tensors(name, gaps, 0.0)]

    # -- a whole step --------------------------------------------------------------------------------------------------

    def step(
        self, number: int, record: RecordedStep, mini_batch: MiniBatch, before: str, updates: int
    ) -> list[Quantity]:
        """Checks one step, number 1 being the first.

        Args:
            before: the moment of what was held before it.
            updates: number of updates before it, skipped ones not counted.
        """
        gaps: dict[str, Gaps] = defaultdict(dict)
        plain = self.model.run(mini_batch, self._load(before))
        finite = all(bool(gradient.isfinite().all()) for gradient in plain.gradients.values())
        norms = {ALL_PARAMETERS: plain.gradient_norm if finite or record.finite else math.nan}
        whole = [
            c.numbers(c.LOSS, {MINI_BATCH: record.loss}, {MINI_BATCH: plain.loss}, self.tolerance),
            c.numbers(c.NORM, {ALL_PARAMETERS: record.gradient_norm}, norms, self.tolerance),
        ]
        if not record.finite:
            return [*whole, *self.unchanged(c.SKIPPED, before, f"held {number}")]
        self._measure_gradients(gaps, number, before, plain)
        limit, norm = self.settings.trainer.gradient_clip, record.gradient_norm
        factor = limit / norm if limit is not None and norm > limit else 1.0
        self._measure_update(gaps, number, before, updates, factor)
        return [
            *self._of_forward(record, plain),
            *whole,
            c.tensors(c.GRADIENTS, gaps[c.GRADIENTS], self.tolerance),
            c.tensors(c.STATE, gaps[c.STATE], self.tolerance),
            *(c.tensors(n, gaps[n], self.tolerance, changes=True) for n in (c.BUFFERS, c.UPDATED, c.AVERAGES)),
            _of_replicas(record.seen.get(HELD, {})),
        ]

    def _measure_gradients(self, gaps: dict[str, Gaps], number: int, before: str, plain: PlainStep) -> None:
        """Measures gradients and buffers; gradients that one side alone has are differences."""
        for layer in range(len(self.names)):
            ours, names = self.spill.get(f"gradients {number}", layer), [n for of, n in self.model.held if of == layer]
            now, old = self._load(f"held {number}")(layer), self._load(before)(layer)
            for key in ((layer, name) for name in names):
                if key not in self.model.weights:
                    gaps[c.BUFFERS][key] = measure(now.get(key[1]), self.model.held[key], old.get(key[1]))
                elif key[1] in ours or key in plain.gradients:
                    gaps[c.GRADIENTS][key] = measure(ours.get(key[1]), plain.gradients.get(key))

    def _of_forward(self, ours: RecordedStep, plain: PlainStep) -> list[Quantity]:
        seen, names, tolerance = ours.seen, self.names, self.tolerance
        first, again = seen.get(OUTPUT, {}), seen.get(AGAIN, {})
        repeated = [(point, mark, first[point]) for point, mark in again.items() if point in first]
        return [
            c.numbers(c.LOSSES, _by_place(ours.losses), _by_place(plain.losses), tolerance),
            c.traces(c.OUTPUTS, _beside(seen, plain), names, tolerance),
            c.traces(c.AGAIN, repeated, names, self.repeated),
        ]

    # -- the update ----------------------------------------------------------------------------------------------------

    def _measure_update(self, gaps: dict[str, Gaps], number: int, before: str, updates: int, factor: float) -> None:
        """Measures each parameter after the update by the pipeline's gradients times ``factor``."""
        decay, optimizer = self.settings.trainer.average, self.settings.optimizer
        groups = Groups(optimizer)
        of_key = cache(partial(learning_rate, optimizer, self.settings.lr_schedule, number))
        owned: dict[Key, Tensor] = {}  # expected values of tied parameters
        for layer in range(len(self.names)):
            old, new = self.spill.get(before, layer), self.spill.get(f"held {number}", layer)
            gradients = self.spill.get(f"gradients {number}", layer)
            for name, weight in self.spill.get(before, layer, "weight").items():
                owner = self.model.owners.get((layer, name))
                if owner is not None:
                    gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), owned[owner], weight)
                    continue
                right, state = weight, _state_of(old, name)
                if name in gradients:
                    of_layer = self.names[layer]
                    group = groups.key(own_name(of_layer, name.removeprefix(f"{of_layer}.")), weight.shape)
                    gradient, on = gradients[name] * factor, self.model.device
                    right, state = update(optimizer, group, of_key(group), weight.to(on), state, gradient.to(on))
                gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), right, weight)
                if (layer, name) in self.model.owners.values():
                    owned[layer, name] = right
                for kind, value in state.items():
                    if isinstance(value, (Tensor, int, float)):
                        key = f"{name}:{kind}"
                        gaps[c.STATE][layer, key] = measure(new.get(f"state/{key}"), torch.as_tensor(value))
            for name, held in self.spill.get(before, layer, "average").items():
                value = new.get(f"weight/{name}", new.get(f"buffer/{name}"))
                if decay is not None and value is not None:
                    expected_average = average(decay, updates, held, value)
                    gaps[c.AVERAGES][layer, name] = measure(new.get(f"average/{name}"), expected_average, held)

    # -- an evaluation -------------------------------------------------------------------------------------------------

    def evaluation(self, numbers: Mapping[str, float], seen: Seen, last: int, mini_batch: MiniBatch) -> list[Quantity]:
        """Compares an evaluation with that of the plain model.

        Args:
            numbers: the pipeline's.
            seen: what was seen of its layers.
            last: number of the step before it, from 1.
            mini_batch: the evaluated mini-batch.
        """
        # averages, where there are any, in place of their weights
        right, plain = self.model.evaluate(mini_batch, self._load(f"held {last}", "average"))
        mine, theirs = ({(NO_LAYER, name): number for name, number in side.items()} for side in (numbers, right))
        return [
            c.traces(c.EVALUATED, _beside(seen, plain), self.names, self.tolerance),
            c.numbers(c.METRICS, mine, theirs, self.tolerance),
            *self.unchanged(c.KEPT, f"held {last}", "evaluated"),
        ]


def _of_replicas(held: Mapping[tuple[int, int, str], Fingerprint]) -> Quantity:
    """Judges the weights of further replicas after the step: the same as the first's, bit for bit."""
    found = []
    for (replica, layer, key), mark in sorted(held.items()):
        if replica:
            first = held.get((0, layer, key))
            gap = math.inf if first is None else mark.gap(first).distance
            found.append(Difference(layer, f"{key} of replica {replica}", gap, gap))
    return judge(c.REPLICAS, sorted(found, key=lambda difference: difference.layer), 0.0)


def _beside(ours: Seen, plain: PlainStep) -> list[tuple[Point, Fingerprint | None, Fingerprint]]:
    """Returns the fingerprints of the plain side's outputs with those of the pipeline, for `compare.traces`."""
    found = ours.get(OUTPUT, {})
    return [(point, found.get(point), mark) for point, mark in plain.outputs.items()]


def _by_place(losses: Mapping[tuple[int, int], float]) -> dict[Key, float]:
    return {(NO_LAYER, f"replica {r}, micro-batch {m}"): loss for (r, m), loss in losses.items()}


def _state_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Returns the optimizer's state of a parameter, of what `Spill` holds of its layer."""
    prefix = f"state/{name}:"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
