"""Checks recorded steps of the pipeline against the plain model and the reference of its update, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before (or of the
beginning) has found to be right. So any step can be checked, and rounding does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import Settings
from ..difference import NO_LAYER, Key, Quantity, measure
from . import compare as c
from .compare import Found, Gaps, VerifiedRun
from .plain import Load, MiniBatch, PlainModel, PlainStep
from .record import (
    AGAIN,
    GRADIENT,
    HELD,
    INPUT,
    MODE,
    OUTPUT,
    RATE,
    SEED,
    USED,
    WEIGHTS,
    Fingerprint,
    Point,
    RecordedStep,
    Seen,
    of_kind,
)
from .reference import Update, average, learning_rate, noise_seed, update
from .spill import Spill

EXACT = 1e-12  # relative; of numbers that both sides compute in float64 by other formulas
MINI_BATCH, ALL_PARAMETERS = (NO_LAYER, "mini-batch"), (NO_LAYER, "all parameters")


@dataclass
class Checker:
    """Checks steps of a run.

    Attributes:
        settings: of the run.
        run: names and places of its layers.
        model: the plain one.
        spill: what the workers have written.
        tolerance: the largest relative difference that counts as rounding.
        repeated: the same of an output that is computed again.
        batchnorms: that a step has seen, by layer and name.
    """

    settings: Settings
    run: VerifiedRun
    model: PlainModel
    spill: Spill
    tolerance: float
    repeated: float
    batchnorms: set[Key] = field(default_factory=set)

    def load(self, moment: str) -> Load:
        """Returns the weights and buffers of a moment, as a function of the layer."""
        return lambda layer: _held(self.spill, moment, layer)

    # -- beginning, skipped steps, resume ------------------------------------------------------------------------------

    def beginning(self, moment: str) -> Quantity:
        """Checks the weights and buffers before the first step: freshly drawn, unless the run is given others."""
        gaps: Gaps = {}
        if self.settings.checkpoint.init_from is not None:
            return Quantity(c.BEGIN, 0, None)
        for cell in self.model.cells:
            ours = {layer: _held(self.spill, moment, layer) for layer in cell}
            for key, tensor in self.model.build(cell).held.items():
                gaps[key] = measure(ours[key[0]].get(key[1]), tensor)
        return c.tensors(c.BEGIN, gaps, self.tolerance * 1e-3)

    def unchanged(self, name: str, before: str, after: str) -> Quantity:
        """Checks that what the workers held at two moments is equal, bit for bit."""
        gaps: Gaps = {}
        for layer in range(len(self.run.names)):
            old, new = self.spill.get(before, layer), self.spill.get(after, layer)
            for key in {*old, *new}:
                gaps[layer, _shown(key)] = measure(new.get(key), old.get(key))
        return c.tensors(name, gaps, 0.0)

    # -- a whole step --------------------------------------------------------------------------------------------------

    def step(self, number: int, record: RecordedStep, mini_batch: MiniBatch, before: str, updates: int) -> Found:
        """Checks one step, number 1 being the first.

        Args:
            before: the moment of what was held before it.
            updates: that the run had made before, skipped ones not counted.
        """
        gaps: dict[str, Gaps] = {c.GRADIENTS: {}, c.BUFFERS: {}}

        def take(cell: int, gradients: Mapping[Key, Tensor], buffers: Mapping[Key, Tensor]) -> None:
            for layer in self.model.cells[cell]:
                ours = self.spill.get(f"gradients {number}", layer)
                for name in {name for of, name in gradients if of == layer} | ours.keys():
                    gaps[c.GRADIENTS][layer, name] = measure(ours.get(name), gradients.get((layer, name)))
                now, old = _held(self.spill, f"held {number}", layer), _held(self.spill, before, layer)
                for (of, name), buffer in buffers.items():
                    if of == layer:
                        gaps[c.BUFFERS][layer, name] = measure(now.get(name), buffer, old.get(name))

        plain = self.model.run(mini_batch, self.load(before), take)
        finite = all(map(math.isfinite, plain.norms.values()))
        norms = {ALL_PARAMETERS: plain.gradient_norm if finite or record.finite else math.nan}
        whole = [
            c.numbers(c.LOSS, {MINI_BATCH: record.loss}, {MINI_BATCH: plain.loss}, self.tolerance),
            c.numbers(c.NORM, {ALL_PARAMETERS: record.gradient_norm}, norms, self.tolerance),
        ]
        if not record.finite:
            return by_name([*whole, self.unchanged(c.SKIPPED, before, f"held {number}")])
        self.batchnorms |= plain.batchnorms
        limit, norm = self.settings.trainer.gradient_clip, record.gradient_norm
        factor = limit / norm if limit is not None and norm > limit else 1.0
        gaps |= self._update(number, before, updates, factor)
        return by_name(
            [
                *self._of_forward(record, plain, mini_batch),
                *whole,
                c.tensors(c.GRADIENTS, gaps[c.GRADIENTS], self.tolerance),
                *self._of_update(number, record.seen, gaps[c.GRADIENTS], factor),
                c.tensors(c.STATE, gaps[c.STATE], self.tolerance),
                *(c.tensors(n, gaps[n], self.tolerance, changes=True) for n in (c.BUFFERS, c.UPDATED, c.AVERAGES)),
                self._of_replicas(record.seen.get(HELD, {})),
            ]
        )

    def _of_forward(self, ours: RecordedStep, plain: PlainStep, mini_batch: MiniBatch) -> list[Quantity]:
        seen, right, run, tolerance = ours.seen, plain.seen, self.run, self.tolerance
        names = [(NO_LAYER, name) for name in self.model.task.statistics]
        sums = [] if plain.statistics is None else plain.statistics.tolist()
        statistics = dict(zip(names, ours.statistics, strict=False)), dict(zip(names, sums, strict=False))
        used = [
            (point, mark, plain.weight_used(point, mark))
            for again in ("", AGAIN)
            for point, mark in seen.get(WEIGHTS + again, {}).items()
        ]
        passed_back = beside(seen.get(GRADIENT, {}), right.get(GRADIENT, {}))
        return [
            c.numbers(c.LOSSES, _by_place(ours.losses), _by_place(plain.losses), tolerance),
            c.numbers(c.STATISTICS, *statistics, tolerance),
            c.traces(c.USED, used, run, EXACT),
            *self._of_calls(seen, plain, mini_batch.step),
            c.traces(c.OUTPUTS, beside(seen.get(OUTPUT, {}), right.get(OUTPUT, {})), run, tolerance),
            c.traces(c.GIVEN_AGAIN, _again(seen, INPUT), run, self.repeated),
            c.traces(c.AGAIN, _again(seen, OUTPUT), run, self.repeated),
            c.traces(c.PASSED_BACK, passed_back, run, tolerance),
        ]

    def _of_calls(self, ours: Seen, plain: PlainStep, step: int) -> list[Quantity]:
        """Judges the seeds of layers that draw random numbers, and how all layers run (training mode, autocast)."""
        right, seeds, modes = plain.seen.get(MODE, {}), [], []
        for again in ("", AGAIN):
            for call, seed in ours.get(SEED + again, {}).items():
                where, mode = self.run.micro_batch(*call) + again, ours[MODE + again][call]
                modes.append((call[2], f"{where} {mode}", right.get(call, mode) == mode))
                if call[2] in plain.draws_noise:
                    seeds.append((call[2], where, seed == noise_seed(self.settings.seed, step, *call)))
        return [c.equal(c.SEEDS, seeds), c.equal(c.MODES, modes)]

    # -- the update ----------------------------------------------------------------------------------------------------

    def _rate(self, number: int) -> float | None:
        return learning_rate(self.settings.optimizer, self.settings.lr_schedule, number)

    def _update(self, number: int, before: str, updates: int, factor: float) -> dict[str, Gaps]:
        """Measures what the update has made of each parameter, given the pipeline's gradients and the right rate."""
        gaps: dict[str, Gaps] = {c.STATE: {}, c.UPDATED: {}, c.AVERAGES: {}}
        rate, decay = self._rate(number), self.settings.trainer.average
        owned: dict[Key, Tensor] = {}  # expected values of tied parameters
        for layer in range(len(self.run.names)):
            old, new = self.spill.get(before, layer), self.spill.get(f"held {number}", layer)
            gradients = self.spill.get(f"gradients {number}", layer)
            for name, weight in of_kind("weight", old).items():
                owner = self.model.owners.get((layer, name))
                if owner is not None:
                    gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), owned[owner], weight)
                    continue
                expected = Update(weight, _state_of(old, name))
                if name in gradients:
                    expected = update(self.settings.optimizer, rate, expected, gradients[name] * factor)
                gaps[c.UPDATED][layer, name] = measure(new.get(f"weight/{name}"), expected.weight, weight)
                if (layer, name) in self.model.owners.values():
                    owned[layer, name] = expected.weight
                for kind, value in expected.state.items():
                    if isinstance(value, (Tensor, int, float)):
                        key = f"{name}:{kind}"
                        gaps[c.STATE][layer, key] = measure(new.get(f"state/{key}"), torch.as_tensor(value))
            for name, held in of_kind("average", old).items():
                value = new.get(f"weight/{name}", new.get(f"buffer/{name}"))
                if decay is not None and value is not None:
                    expected_average = average(decay, updates, held, value)
                    gaps[c.AVERAGES][layer, name] = measure(new.get(f"average/{name}"), expected_average, held)
        return gaps

    def _of_update(self, number: int, seen: Seen, gradients: Gaps, factor: float) -> Iterator[Quantity]:
        used, rates, rate = seen.get(USED, {}), seen.get(RATE, {}), self._rate(number)
        factors = {key: used[key] / gap.ours for key, gap in gradients.items() if gap.ours and key in used}
        limit = max(1e-5, self.tolerance * 1e-2)
        yield c.numbers(c.CLIPPED, factors, dict.fromkeys(factors, factor), limit, limit)
        yield c.numbers(c.RATES, rates, {} if rate is None else dict.fromkeys(rates, rate), 1e-9, 1e-9)

    def _of_replicas(self, held: Mapping[tuple[int, int, str], Fingerprint]) -> Quantity:
        """Judges what further replicas hold after the step: the same as the first, bit for bit."""
        found = []
        for (replica, layer, key), mark in sorted(held.items()):
            if replica:
                first = held.get((0, layer, key))
                same = first is not None and mark.distance(first) == 0
                found.append((layer, f"{_shown(key)} of replica {replica}", same))
        return c.equal(c.REPLICAS, found)


def by_name(quantities: Iterable[Quantity]) -> Found:
    """Returns what was compared, by name, without what had nothing to compare."""
    return {quantity.name: quantity for quantity in quantities if quantity.compared}


def beside(
    ours: Mapping[Point, Fingerprint], plain: Mapping[Point, Fingerprint]
) -> list[tuple[Point, Fingerprint | None, Fingerprint]]:
    """Returns the fingerprints of the plain side with those of the pipeline, for `compare.traces`."""
    return [(point, ours.get(point), mark) for point, mark in plain.items()]


def _again(seen: Seen, kind: str) -> list[tuple[Point, Fingerprint | None, Fingerprint]]:
    """Returns the same of what a recompute repeats, with the first forward as the right side."""
    first = seen.get(kind, {})
    return [(point, mark, first[point]) for point, mark in seen.get(kind + AGAIN, {}).items() if point in first]


def _by_place(losses: Mapping[tuple[int, int], float]) -> dict[Key, float]:
    return {(NO_LAYER, f"replica {r}, micro-batch {m}"): loss for (r, m), loss in losses.items()}


def _held(spill: Spill, moment: str, layer: int) -> dict[str, Tensor]:
    """Returns weights and buffers by full name."""
    tensors = spill.get(moment, layer)
    return {**of_kind("weight", tensors), **of_kind("buffer", tensors)}


def _state_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Returns the optimizer's state of a parameter, of what `Spill` holds of its layer."""
    return {key.removeprefix(f"{name}:"): value for key, value in of_kind("state", tensors).items()
            if key.startswith(f"{name}:")}  # fmt: skip


def _shown(key: str) -> str:
    """Returns how a name of `RunWatch.hold` is shown."""
    kind, _, name = key.partition("/")
    return name if kind in ("weight", "buffer", "state") else f"{name} ({kind})"
