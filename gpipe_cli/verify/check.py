"""Checks recorded steps of the pipeline against the plain model and the reference of its update, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before (or of the
beginning) has found to be right. So any step can be checked, and rounding does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Settings
from . import compare as c
from .compare import Gaps, Quantity, StepComparison, measure
from .layout import VerifiedRun
from .plain import Load, MiniBatch, PlainModel, PlainStep, Together, discard
from .record import (
    GRADIENT,
    OUTPUT,
    RECOMPUTED,
    WEIGHTS,
    WEIGHTS_AGAIN,
    Key,
    Point,
    RecordedStep,
    of_kind,
)
from .reference import Update, average, learning_rate, noise_seed, update
from .spill import Spill

AGAIN = " in recompute"  # in the name of what is compared
EXACT = 1e-12  # relative; of numbers that both sides compute in float64 by other formulas


@dataclass(frozen=True)
class ComparedStep:
    """Holds both sides of one step and their comparison.

    Attributes:
        number: of the step, from 1.
        ours: of the pipeline.
        plain: of the plain model; None for a step that is not computed again.
        found: the comparison.
    """

    number: int
    ours: RecordedStep
    plain: PlainStep | None
    found: StepComparison


@dataclass
class Checker:
    """Checks steps of a run.

    Attributes:
        settings: of the run.
        run: names and places of its layers.
        model: the plain one.
        spill: what the workers have written.
        tolerance: the largest relative difference that counts as rounding.
    """

    settings: Settings
    run: VerifiedRun
    model: PlainModel
    spill: Spill
    tolerance: float

    @property
    def together(self) -> Together:
        pipeline = self.settings.pipeline
        return Together.REPLICAS if pipeline.sync_batchnorm and pipeline.replicas > 1 else Together.NOTHING

    def load(self, moment: str) -> Load:
        """Returns the weights and buffers of a moment, as a function of the layer."""
        return lambda layer: _held(self.spill, moment, layer)

    # -- beginning, skipped steps, resume ------------------------------------------------------------------------------

    def beginning(self, moment: str, expected: Load) -> Quantity:
        """Checks the weights and buffers before the first step: freshly drawn layers, or what ``expected`` adds."""
        gaps: Gaps = {}
        for cell in self.model.cells:
            built = self.model.build(cell, expected)
            ours = {layer: _held(self.spill, moment, layer) for layer in cell}
            for key, tensor in built.held.items():
                gaps[key] = measure(ours[key[0]].get(key[1]), tensor)
        return c.tensors(c.BEGIN, gaps, self.tolerance * 1e-3)

    def unchanged(self, name: str, before: str, after: str) -> Quantity:
        """Checks that what the workers held at two moments is equal, bit for bit."""
        gaps: Gaps = {}
        for layer in range(len(self.run.names)):
            old, new = self.spill.get(before, layer), self.spill.get(after, layer)
            for key in {*old, *new}:
                gaps[layer, _shown(key)] = measure(new.get(key), old.get(key))
        return c.exact(name, gaps)

    def skipped(self, number: int, record: RecordedStep, before: str, after: str) -> ComparedStep:
        """Checks a step whose loss was not finite: it must leave everything as it was."""
        return ComparedStep(number, record, None, StepComparison([self.unchanged(c.SKIPPED, before, after)]))

    def not_finite(
        self, number: int, record: RecordedStep, mini_batch: MiniBatch, before: str, after: str
    ) -> ComparedStep:
        """Checks a step that is not finite by itself: the plain one must not be finite either."""
        plain = self.model.run(mini_batch, self.together, self.load(before), discard)
        norm = plain.gradient_norm if all(map(math.isfinite, plain.norms.values())) else math.nan
        found = [
            c.numbers(c.LOSS, {"mini-batch": (record.loss, plain.loss)}, self.tolerance),
            c.numbers(c.NORM, {"all parameters": (record.gradient_norm, norm)}, self.tolerance),
            self.unchanged(c.SKIPPED, before, after),
        ]
        return ComparedStep(number, record, plain, StepComparison(found))

    # -- a whole step --------------------------------------------------------------------------------------------------

    def step(self, number: int, record: RecordedStep, mini_batch: MiniBatch, before: str, updates: int) -> ComparedStep:
        """Checks one step.

        Args:
            number: from 1.
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

        plain = self.model.run(mini_batch, self.together, self.load(before), take)
        limit, norm = self.settings.trainer.gradient_clip, record.gradient_norm
        factor = limit / norm if limit is not None and norm > limit else 1.0
        gaps |= self._update(number, record, before, updates, factor)
        found = StepComparison(
            [
                *self._of_forward(record, plain, mini_batch),
                c.tensors(c.GRADIENTS, gaps[c.GRADIENTS], self.tolerance),
                c.numbers(c.NORM, {"all parameters": (norm, plain.gradient_norm)}, self.tolerance),
                *self._of_update(number, record, gaps, factor),
                c.numbers_by_key(c.COUNTS, record.counted, plain.counted, 0.0),
                c.tensors(c.BUFFERS, gaps[c.BUFFERS], self.tolerance, changes=True),
                self._of_state(gaps[c.STATE]),
                c.tensors(c.UPDATED, gaps[c.UPDATED], self.tolerance, changes=True),
                c.tensors(c.AVERAGES, gaps[c.AVERAGES], self.tolerance, changes=True),
                self._of_replicas(record),
            ]
        )
        present = StepComparison([quantity for quantity in found.quantities if quantity.compared])
        return ComparedStep(number, record, plain, present)

    def _of_forward(self, ours: RecordedStep, plain: PlainStep, mini_batch: MiniBatch) -> list[Quantity]:
        names, trace, right, tolerance = self.run.names, ours.trace, plain.seen.trace, self.tolerance
        forward, again = trace.get(OUTPUT, {}), trace.get(RECOMPUTED, {})
        # The places are the plain side's: the pipeline's report of a step that is not full has more, all zero.
        losses = {
            f"replica {r}, micro-batch {m}": (ours.losses.get((r, m), math.nan), loss)
            for (r, m), loss in sorted(plain.losses.items())
        }
        sums = [] if plain.statistics is None else plain.statistics.tolist()
        pairs = zip(ours.statistics, sums, strict=True)
        used = [trace.get(kind, {}) for kind in (WEIGHTS, WEIGHTS_AGAIN)]
        held = [{point: plain.weight_used(point, mark) for point, mark in marks.items()} for marks in used]
        repeated = {point: mark for point, mark in forward.items() if point in again}
        return [
            c.numbers(c.LOSS, {"mini-batch": (ours.loss, plain.loss)}, tolerance),
            c.numbers(c.LOSSES, losses, tolerance),
            c.numbers(c.STATISTICS, dict(zip(self.run.statistics, pairs, strict=True)), tolerance),
            _joined(*(c.traces(c.USED, *sides, names, EXACT) for sides in zip(used, held, strict=True))),
            *self._of_calls(ours, plain, mini_batch.step),
            c.traces(c.OUTPUTS, forward, right.get(OUTPUT, {}), names, tolerance),
            c.traces(c.AGAIN, again, repeated, names, min(tolerance, self.run.repeated)),
            c.traces(c.PASSED_BACK, trace.get(GRADIENT, {}), right.get(GRADIENT, {}), names, tolerance),
        ]

    def _of_calls(self, ours: RecordedStep, plain: PlainStep, step: int) -> list[Quantity]:
        """Judges the seeds of layers that draw random numbers, and how all layers run (training mode, autocast)."""
        right, seeds, modes = plain.seen.modes.get(OUTPUT, {}), [], []
        for kind, again in ((WEIGHTS, ""), (WEIGHTS_AGAIN, AGAIN)):
            for call, seed in ours.seeds.get(kind, {}).items():
                where, mode = self.run.micro_batch(*call) + again, ours.modes[kind][call]
                modes.append((Point(*call, 0), f"{where} {mode}", right.get(call, mode) == mode))
                if call[2] in plain.draws_noise:
                    expected = noise_seed(self.settings.seed, step, *call)
                    seeds.append((Point(*call, 0), where, seed == expected))
        return [c.equal(c.SEEDS, seeds), c.equal(c.MODES, modes)]

    # -- the update ----------------------------------------------------------------------------------------------------

    def rate(self, number: int) -> float | None:
        """Returns the learning rate of a step."""
        return learning_rate(self.settings.optimizer, self.settings.lr_schedule, number)

    def _update(self, number: int, record: RecordedStep, before: str, updates: int, factor: float) -> dict[str, Gaps]:
        """Measures what the update has made of each parameter, given the pipeline's gradients and the right rate."""
        gaps: dict[str, Gaps] = {c.STATE: {}, c.UPDATED: {}, c.AVERAGES: {}}
        rate, decay = self.rate(number), self.settings.trainer.average
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

    def _of_update(self, number: int, record: RecordedStep, gaps: Mapping[str, Gaps], factor: float) -> list[Quantity]:
        whole: dict[Key, float] = {key: gap.ours for key, gap in gaps[c.GRADIENTS].items()}
        factors = {key: record.used[key] / norm for key, norm in whole.items() if norm and key in record.used}
        rate, rates = self.rate(number), record.rates
        return [
            c.numbers_by_key(c.CLIPPED, factors, dict.fromkeys(factors, factor), max(1e-5, self.tolerance * 1e-2)),
            c.numbers_by_key(c.RATES, rates, {} if rate is None else dict.fromkeys(rates, rate), 1e-9),
        ]

    def _of_state(self, gaps: Gaps) -> Quantity:
        """Judges the optimizer's state, in which `exp_avg` is compared with all `exp_avg`."""
        kinds: dict[str, Gaps] = {}
        for key, gap in gaps.items():
            kinds.setdefault(key[1].rpartition(":")[2], {})[key] = gap
        return _joined(*(c.tensors(c.STATE, of_one, self.tolerance) for of_one in kinds.values()))

    def _of_replicas(self, record: RecordedStep) -> Quantity:
        """Judges what further replicas hold after the step: the same as the first, bit for bit."""
        first = record.held.get(0, {})
        return c.equal(
            c.REPLICAS,
            [
                (
                    Point(replica, 0, key[0], 0),
                    f"{_shown(key[1])} of replica {replica}",
                    key in first and mark.distance(first[key]) == 0,
                )
                for replica, held in sorted(record.held.items())
                for key, mark in sorted(held.items())
                if replica
            ],
        )


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


def _joined(*quantities: Quantity) -> Quantity:
    """Returns several quantities of one name as one."""
    name = quantities[0].name if quantities else c.STATE
    worst = max((q.worst for q in quantities if q.worst), key=lambda d: (d.relative, d.absolute), default=None)
    beyond = sorted((d for q in quantities for d in q.beyond), key=lambda d: (d.layer, d.where))
    return Quantity(name, sum(q.compared for q in quantities), worst, beyond)
