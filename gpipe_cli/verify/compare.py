"""Compares two ways to run one training step: which quantities differ, by how much, and in which layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .record import GRADIENT, OUTPUT, RECOMPUTED, WEIGHTS, WEIGHTS_AGAIN, Fingerprint, Key, Point, StepState, number_gap

SMALL_SHARE = 0.01  # tensors smaller than this share of all of their kind are measured by this share of all
NO_LAYER = -1  # for quantities of the whole model


@dataclass(frozen=True)
class Difference:
    """Holds the difference of one tensor, fingerprint or number between the two sides.

    Attributes:
        layer: its layer, `NO_LAYER` for the whole model.
        where: its name, for the report.
        absolute: largest difference of two elements (of fingerprints: of the two norms).
        relative: norm of the difference divided by the norm that `compare` describes; inf where one side has nothing.
        point: of a fingerprint.
    """

    layer: int
    where: str
    absolute: float
    relative: float
    point: Point | None = None


@dataclass(frozen=True)
class Quantity:
    """Holds the differences of one kind, such as all gradients.

    Attributes:
        name: for the report.
        compared: their number.
        worst: the largest relative difference; None where there are none.
        beyond: the differences beyond the tolerance, in layer order.
    """

    name: str
    compared: int
    worst: Difference | None
    beyond: list[Difference] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.beyond:
            return f"DIFFERS ({len(self.beyond)} of {self.compared})"
        if self.worst is None:
            return "none"
        return "bit for bit" if self.worst.absolute == 0 and self.worst.relative == 0 else "OK"


LOSS, LOSSES, NORM, GRADIENTS = "loss", "losses of micro-batches", "gradient norm", "gradients"
OUTPUTS, AGAIN, PASSED_BACK = "outputs of layers", "outputs recomputed", "gradients between layers"
COUNTS, BUFFERS, STATE, UPDATED = "BatchNorm counts", "BatchNorm and other buffers", "optimizer state", "weights after"
USED, BEGIN = "weights used", "weights before"


def compare(
    ours: StepState, plain: StepState, before: StepState, tolerance: float, names: Sequence[str]
) -> StepComparison:
    """Compares all quantities of one step.

    A difference is divided by the norm of the plain side's tensor, but at least by `SMALL_SHARE` of the norm of all
    tensors of the kind (a gradient that is nothing but rounding may differ by all of itself). For weights and buffers
    it is divided by how far the step has moved them.

    Args:
        ours: of the pipeline.
        plain: of the plain loop.
        before: weights and buffers before the step, of the plain loop.
        tolerance: the largest relative difference that counts as rounding.
        names: of the layers.
    """
    rounding = 8 * torch.finfo(_dtype(plain.weights)).eps
    differences = [
        _numbers(LOSS, {"mini-batch": (ours.loss, plain.loss)}),
        # The places are the plain side's: the pipeline's report of a step that is not full has more, all zero.
        _numbers(
            LOSSES,
            {
                f"replica {r}, micro-batch {m}": (ours.losses.get((r, m), math.nan), loss)
                for (r, m), loss in sorted(plain.losses.items())
            },
        ),
        _traces(OUTPUTS, ours.trace.get(OUTPUT, {}), plain.trace.get(OUTPUT, {}), names),
        _traces(AGAIN, ours.trace.get(RECOMPUTED, {}), ours.trace.get(OUTPUT, {}), names),
        _traces(PASSED_BACK, ours.trace.get(GRADIENT, {}), plain.trace.get(GRADIENT, {}), names),
        _tensors(GRADIENTS, ours.gradients, plain.gradients, _by_norm(plain.gradients)),
        _numbers(NORM, {"all parameters": (ours.gradient_norm, plain.gradient_norm)}),
        _counts(ours.counted, plain.counted),
        _tensors(BUFFERS, ours.buffers, plain.buffers, _by_change(plain.buffers, before.buffers, rounding / tolerance)),
        _tensors(STATE, ours.optimizer, plain.optimizer, _by_norm_of_kind(plain.optimizer)),
        _tensors(UPDATED, ours.weights, plain.weights, _by_change(plain.weights, before.weights, rounding / tolerance)),
    ]
    return StepComparison([_judged(name, found, tolerance) for name, found in differences if found])


def compare_beginnings(ours: StepState, plain: StepState, tolerance: float) -> Quantity:
    """Compares weights and buffers before the first step."""
    held = {**plain.weights, **plain.buffers}
    return _judged(*_tensors(BEGIN, {**ours.weights, **ours.buffers}, held, _by_norm(held)), tolerance)


def gradients_agree(ours: StepState, plain: StepState, tolerance: float) -> bool:
    """Returns whether every gradient is within the tolerance."""
    measured = _tensors(GRADIENTS, ours.gradients, plain.gradients, _by_norm(plain.gradients))
    return not _judged(*measured, tolerance).beyond


@dataclass(frozen=True)
class StepComparison:
    """Holds the comparison of one step."""

    quantities: list[Quantity]

    def __getitem__(self, name: str) -> Quantity:
        """Returns the quantity of that name; an empty one where there is none."""
        return next((q for q in self.quantities if q.name == name), Quantity(name, 0, None))

    def after(self, first: Quantity) -> StepComparison:
        """Returns the same with one more quantity in front."""
        return StepComparison([first, *self.quantities])

    @property
    def agrees(self) -> bool:
        """Returns whether all results agree. Gradients between layers only help to find an error's place."""
        return not any(quantity.beyond for quantity in self.quantities if quantity.name != PASSED_BACK)


Measured = tuple[str, list[Difference]]


def _judged(name: str, found: list[Difference], tolerance: float) -> Quantity:
    worst = max(found, key=lambda d: (d.relative, d.absolute))
    return Quantity(name, len(found), worst, [d for d in found if d.relative > tolerance])


def _dtype(tensors: Mapping[Key, Tensor]) -> torch.dtype:
    return next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)


# -- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(name: str, pairs: Mapping[str, tuple[float, float]]) -> Measured:
    return name, [
        Difference(NO_LAYER, where, gap := number_gap(a, b), gap / abs(b) if b and math.isfinite(b) and gap else gap)
        for where, (a, b) in pairs.items()
    ]


def _counts(ours: Mapping[Key, float], plain: Mapping[Key, float]) -> Measured:
    found = []
    for (layer, name), count in sorted(plain.items()):
        gap = abs(ours.get((layer, name), 0.0) - count)
        found.append(Difference(layer, name, gap, gap / count if count else gap))
    return COUNTS, found


# -- tensors ---------------------------------------------------------------------------------------------------------

Scale = Callable[[Key], float]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _total(norms: Mapping[Key, float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms.values() if math.isfinite(norm)))


def _by_norm(tensors: Mapping[Key, Tensor]) -> Scale:
    norms = {key: _norm(tensor) for key, tensor in tensors.items()}
    least = SMALL_SHARE * _total(norms)
    return lambda key: max(norms.get(key, 0.0), least)


def _by_norm_of_kind(tensors: Mapping[Key, Tensor]) -> Scale:
    """Returns the scale of optimizer state, in which `exp_avg` is compared with all `exp_avg`."""
    kinds: dict[str, dict[Key, float]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault(key[1].rpartition(":")[2], {})[key] = _norm(tensor)
    norms = {key: norm for kind in kinds.values() for key, norm in kind.items()}
    least = {kind: SMALL_SHARE * _total(of_kind) for kind, of_kind in kinds.items()}
    return lambda key: max(norms.get(key, 0.0), least.get(key[1].rpartition(":")[2], 0.0))


def _by_change(after: Mapping[Key, Tensor], before: Mapping[Key, Tensor], least_share: float) -> Scale:
    """Returns as scale how far the step moved a tensor, and at least ``least_share`` of its norm, for its rounding."""
    changes = {key: _norm(tensor.double() - before[key].double()) for key, tensor in after.items() if key in before}
    least = SMALL_SHARE * _total(changes)
    return lambda key: max(changes.get(key, 0.0), least, least_share * _norm(after[key]) if key in after else 0.0)


def _tensors(name: str, ours: Mapping[Key, Tensor], plain: Mapping[Key, Tensor], scale: Scale) -> Measured:
    found = []
    for key in sorted({*ours, *plain}):
        layer, where = key
        if key not in ours or key not in plain:
            found.append(Difference(layer, f"{where} (only {'here' if key in ours else 'plain'})", math.inf, math.inf))
            continue
        found.append(Difference(layer, where, *_gap(ours[key], plain[key], scale(key))))
    return name, found


def _gap(a: Tensor, b: Tensor, scale: float) -> tuple[float, float]:
    """Returns the largest absolute difference, and the norm of the difference divided by ``scale``.

    Elements that are not finite on both sides agree.
    """
    if torch.equal(a, b):
        return 0.0, 0.0
    if a.shape != b.shape:
        return math.inf, math.inf
    x, y = a.double(), b.double()
    finite = torch.isfinite(x)
    if not torch.equal(finite, torch.isfinite(y)):
        return math.inf, math.inf
    gap = torch.where(finite, x - y, 0.0)
    norm = _norm(gap)
    return float(gap.abs().max()) if gap.numel() else 0.0, norm / scale if scale else (math.inf if norm else 0.0)


# -- traces ----------------------------------------------------------------------------------------------------------


def _traces(
    name: str, ours: Mapping[Point, Fingerprint], plain: Mapping[Point, Fingerprint], names: Sequence[str]
) -> Measured:
    """Compares the points that both sides have: an unused output has no gradient, or zero where a cut follows."""
    largest: dict[int, float] = {}
    for point, mark in plain.items():
        largest[point.layer] = max(largest.get(point.layer, 0.0), mark.norm)
    points = sorted(ours.keys() & plain.keys(), key=lambda p: (p.layer, p.replica, p.micro_batch, p.number))
    found = []
    for point in points:
        gap = ours[point].distance(plain[point])
        scale = max(plain[point].norm, SMALL_SHARE * largest[point.layer])
        relative = gap / scale if scale and math.isfinite(gap) and math.isfinite(scale) else gap
        where = f"{names[point.layer]}, micro-batch {point.micro_batch}"
        where += f" of replica {point.replica}" if point.replica else ""
        found.append(Difference(point.layer, where, number_gap(ours[point].norm, plain[point].norm), relative, point))
    return name, found


def weights_used(ours: StepState, plain: StepState, names: Sequence[str], again: bool) -> list[Difference]:
    """Compares the weights that layers used in forward (``again``: in recompute) with those of the plain loop."""
    kind = WEIGHTS_AGAIN if again else WEIGHTS
    return _traces(USED, ours.trace.get(kind, {}), plain.trace.get(WEIGHTS, {}), names)[1]
