"""Checks recorded steps of the pipeline against the plain model, on rank 0.

A step begins on both sides with what the pipeline held before it, which the check of the step before has found to be
right, and the plain side is updated by the pipeline's own gradients. So rounding does not add up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..comparison.difference import NO_LAYER, Gap, Key, Quantity, measure
from ..config import Settings
from ..micro_batch import MicroBatch
from ..pipeline.gradients import clip_factor
from ..pipeline.step import StepResult
from ..trainer.assembly import Assembly
from . import compare as c
from .compare import Gaps
from .plain import PlainModel, PlainStep
from .record import AGAIN, OUTPUT, Place, Point, Sight, Spill

Numbers = float | list[float]
KINDS = {"weight": c.UPDATED, "buffer": c.BUFFERS, "state": c.STATE}
TOLERANCES = {"float64": 1e-6, "bfloat16": 1e-3, "float16": 1e-3, "tf32": 1e-3, "float32": 1e-4}


def tolerance_of(settings: Settings) -> float:
    """Returns the largest relative difference that counts as rounding, by the coarsest type in use."""
    precision = settings.precision
    tf32 = "tf32" if precision.tf32 and settings.pipeline.device != "cpu" else None
    if settings.verify.dtype == "float64":
        return TOLERANCES["float64"]
    return TOLERANCES[precision.autocast or precision.boundaries or tf32 or "float32"]


class Checker:
    """Checks steps of a run.

    Args:
        assembly: objects of rank 0's worker.
        spill: files of the workers' tensors.

    Attributes:
        model: the plain model.
        places: place of each layer, as ``layer conv (cell 0)``.
        tolerance: largest relative difference that counts as rounding.
    """

    def __init__(self, assembly: Assembly, spill: Spill) -> None:
        settings, cut, device = assembly.settings, assembly.pipeline.cut, assembly.world.device
        names = [builder.name for builder in assembly.builders]
        owners = {
            (index, f"{names[index]}.{own}"): (names.index(owner.layer), str(owner))
            for index, tied in enumerate(cut.ties)
            for own, owner in tied.items()
        }
        self.model = PlainModel(settings, assembly.pipeline.task, device, owners)
        self.places = [f"layer {names[layer]} (cell {cell})" for cell, own in enumerate(cut.layers) for layer in own]
        self.tolerance = tolerance_of(settings)
        self._recomputed = 0.0 if device.type == "cpu" else 1e-6  # the same for outputs that are computed again
        self._names, self._spill, self._clip = names, spill, settings.trainer.gradient_clip

    def step(
        self, number: int, result: StepResult, seen: Sequence[Sight], micro_batches: Mapping[Place, MicroBatch]
    ) -> list[Quantity]:
        """Checks one step. A step that was skipped must have changed nothing.

        Args:
            number: number of the step, from 1.
            result: numbers of the step that all workers know.
            seen: fingerprints of all workers.
            micro_batches: micro-batches of all replicas, in the order of `PlainModel.run`.
        """
        before, now = f"held {number - 1}", f"held {number}"
        gaps: dict[str, Gaps] = defaultdict(dict)
        plain = self.model.run(number - 1, micro_batches, result.plan.loss_scale, partial(self._spill.get, before))
        gradients: dict[Key, Tensor] = {}
        for layer in range(len(self._names)):
            gradients |= {(layer, name): g for name, g in self._spill.get(f"gradients {number}", layer).items()}
        if result.finite:
            for key in gradients.keys() | plain.gradients.keys():  # what one side alone has is a difference
                gaps[c.GRADIENTS][key] = measure(gradients.get(key), plain.gradients.get(key))
        self.model.update(gradients, clip_factor(result.gradient_norm, self._clip) if result.finite else None)
        for layer in range(len(self._names)):
            old, new = self._spill.get(before, layer), self._spill.get(now, layer)
            for full_name, right in self.model.holds(layer).items():
                kind, _, name = full_name.partition("/")
                expected = right if result.finite else old[full_name]
                begun = None if kind == "state" else old.get(full_name)
                gaps[KINDS[kind]][layer, name] = measure(new.get(full_name), expected, begun)
        for moment in (before, f"gradients {number}"):
            self._spill.drop(moment)
        self._measure_forward(gaps, result, seen, plain)
        return [c.judged(name, gaps[name], self._recomputed if name == c.AGAIN else self.tolerance) for name in c.ORDER]

    def _measure_forward(
        self, gaps: dict[str, Gaps], result: StepResult, seen: Sequence[Sight], plain: PlainStep
    ) -> None:
        """Measures outputs, losses and the norm of the gradients; adds the gaps to ``gaps`` by quantity."""
        first, again = ({Point(*at): mark for own, at, mark in seen if own == kind} for kind in (OUTPUT, AGAIN))
        for point, right in plain.outputs.items():
            gaps[c.OUTPUTS][self._named(point)] = _gap(first.get(point), right, torch.float64)
        for point, mark in again.items():
            gaps[c.AGAIN][self._named(point)] = _gap(mark, first.get(point), torch.float64)
        for (replica, micro_batch), loss in plain.losses.items():
            where = f"replica {replica}, micro-batch {micro_batch}"
            gaps[c.LOSSES][NO_LAYER, where] = _gap(result.losses[replica][micro_batch], loss)
        gaps[c.LOSS][NO_LAYER, "mini-batch"] = _gap(result.loss, plain.loss)
        gaps[c.NORM][NO_LAYER, "all parameters"] = _gap(result.gradient_norm, plain.gradient_norm)

    def _named(self, point: Point) -> Key:
        """Returns the layer of a fingerprint, and the fingerprint's name in the report."""
        of_replica = f" of replica {point.replica}" if point.replica else ""
        of_number = f", tensor {point.number}" if point.number else ""
        return point.layer, f"{self._names[point.layer]}, micro-batch {point.micro_batch}{of_replica}{of_number}"


def _gap(ours: Numbers | None, right: Numbers | None, dtype: torch.dtype | None = None) -> Gap:
    """Measures the gap of numbers, by default in torch's own type, where sums in another order are mostly equal."""
    return measure(*(None if side is None else torch.tensor(side, dtype=dtype) for side in (ours, right)))
