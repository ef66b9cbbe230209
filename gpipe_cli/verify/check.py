"""Checks recorded steps of the pipeline against the plain model, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before has found to be
right, and the plain side is updated by the pipeline's own gradients. So rounding does not add up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..comparison.difference import NO_LAYER, Gap, Key, Quantity, measure
from ..micro_batch import MicroBatch
from ..pipeline.gradients import clip_factor
from . import compare as c
from .compare import Gaps
from .plain import PlainModel, PlainStep
from .record import AGAIN, OUTPUT, Place, Point, RecordedStep, Spill

Numbers = float | list[float]
KINDS = {"weight": c.UPDATED, "buffer": c.BUFFERS, "state": c.STATE}


@dataclass
class Checker:
    """Checks steps of a run.

    Attributes:
        names, places: name and place of each layer, as ``conv`` and ``layer conv (cell 0)``.
        model: the plain one.
        spill: what the workers have written.
        tolerance: the largest relative difference that counts as rounding.
        repeated: the same, for an output that recompute computes again.
        clip: the largest norm of the gradients; None: they are not clipped.
    """

    names: Sequence[str]
    places: Sequence[str]
    model: PlainModel
    spill: Spill
    tolerance: float
    repeated: float
    clip: float | None

    def step(self, number: int, record: RecordedStep, micro_batches: Mapping[Place, MicroBatch]) -> list[Quantity]:
        """Checks one step, number 1 being the first. A step that was skipped must have changed nothing."""
        before, now = f"held {number - 1}", f"held {number}"
        gaps: dict[str, Gaps] = defaultdict(dict)
        load = partial(self.spill.get, before, kinds=("weight", "buffer"))
        plain = self.model.run(number - 1, micro_batches, record.loss_scale, load)
        gradients: dict[Key, Tensor] = {}
        for layer in range(len(self.names)):
            gradients |= {(layer, name): g for name, g in self.spill.get(f"gradients {number}", layer).items()}
        if record.finite:
            for key in gradients.keys() | plain.gradients.keys():  # what one side alone has is a difference
                gaps[c.GRADIENTS][key] = measure(gradients.get(key), plain.gradients.get(key))
        self.model.update(gradients, clip_factor(record.gradient_norm, self.clip) if record.finite else None)
        for layer in range(len(self.names)):
            old, new = self.spill.get(before, layer), self.spill.get(now, layer)
            for full_name, right in self.model.holds(layer).items():
                kind, _, name = full_name.partition("/")
                expected = right if record.finite else old[full_name]
                begun = None if kind == "state" else old.get(full_name)
                gaps[KINDS[kind]][layer, name] = measure(new.get(full_name), expected, begun)
        for moment in (before, f"gradients {number}"):
            self.spill.drop(moment)
        self._measure_forward(gaps, record, plain)
        return [c.judged(name, gaps[name], self.repeated if name == c.AGAIN else self.tolerance) for name in c.ORDER]

    def _measure_forward(self, gaps: dict[str, Gaps], record: RecordedStep, plain: PlainStep) -> None:
        """Measures outputs, losses and the norm of the gradients; adds the gaps to ``gaps`` by quantity."""
        first, again = record.seen.get(OUTPUT, {}), record.seen.get(AGAIN, {})
        for point, right in plain.outputs.items():
            gaps[c.OUTPUTS][self._named(point)] = _gap(first.get(point), right, torch.float64)
        for point, mark in again.items():
            gaps[c.AGAIN][self._named(point)] = _gap(mark, first.get(point), torch.float64)
        for (replica, micro_batch), loss in plain.losses.items():
            where = f"replica {replica}, micro-batch {micro_batch}"
            gaps[c.LOSSES][NO_LAYER, where] = _gap(record.losses.get((replica, micro_batch)), loss)
        gaps[c.LOSS][NO_LAYER, "mini-batch"] = _gap(record.loss, plain.loss)
        gaps[c.NORM][NO_LAYER, "all parameters"] = _gap(record.gradient_norm, plain.gradient_norm)

    def _named(self, point: Point) -> Key:
        """Returns the layer of a fingerprint, and the fingerprint's name in the report."""
        of_replica = f" of replica {point.replica}" if point.replica else ""
        of_number = f", tensor {point.number}" if point.number else ""
        return point.layer, f"{self.names[point.layer]}, micro-batch {point.micro_batch}{of_replica}{of_number}"


def _gap(ours: Numbers | None, right: Numbers | None, dtype: torch.dtype | None = None) -> Gap:
    """Measures the gap of numbers, by default in torch's own type, where sums in another order are mostly equal."""
    return measure(*(None if side is None else torch.tensor(side, dtype=dtype) for side in (ours, right)))
