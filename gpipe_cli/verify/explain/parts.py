"""Explains gradients that differ by what they are made of: how often each micro-batch counts, and what was left over.

The gradient of a mini-batch is the sum of those of its micro-batches. Where the pipeline's is a sum of the same parts
with other factors, these say what went wrong: a micro-batch left out or counted twice, a replica not added, a mean in
place of a sum, the gradients of the step before still there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import compare as c
from ..check import Checker, ComparedStep
from ..layout import VerifiedRun
from ..plain import Together
from ..record import Key, Place

EARLIER: Place = (-1, -1)  # stands for the whole gradient of the step before
FITS = 1e-3  # relative; a sum of parts that is as near as this explains a gradient
Parts = dict[Place, float]


def explain_parts(now: ComparedStep, checker: Checker) -> list[str]:
    """Returns what the gradients of the first layers that differ are made of, as sentences; empty where unknown."""
    layers = now.found[c.GRADIENTS].layers
    if not layers or now.mini_batch is None:
        return []
    moments = _parts_apart(now, checker, layers)
    made = {layer: _made_of(now, checker, layer, moments) for layer in layers}
    for moment in moments.values():
        checker.spill.drop(moment)
    texts: dict[str, list[int]] = {}
    for layer, parts in made.items():
        if parts is not None and any(abs(share - (place != EARLIER)) > 1e-2 for place, share in parts.items()):
            texts.setdefault(_in_words(parts, now, checker), []).append(layer)
    run = checker.run
    return [f"in {_where(of, run)} {text}" for text, of in list(texts.items())[:2]]


def _where(layers: Sequence[int], run: VerifiedRun) -> str:
    if len(layers) == len(run.names):
        return "all layers"
    names = ", ".join(run.names[layer] for layer in layers[:3]) + (", …" if len(layers) > 3 else "")
    return f"{run.cells_of(layers)} ({names})"


# -- the parts ---------------------------------------------------------------------------------------------------------


def _parts_apart(now: ComparedStep, checker: Checker, layers: Sequence[int]) -> dict[Place, str]:
    """Computes the plain gradients of every micro-batch by itself; returns the moments that hold them."""
    assert now.mini_batch is not None
    moments = {}
    for group in (group for groups in now.mini_batch.sums(checker.together) for group in groups):
        moment = f"part {group[0]}"

        def take(cell: int, gradients: Mapping[Key, Tensor], buffers: object, moment: str = moment) -> None:
            for layer in set(layers).intersection(checker.model.cells[cell]):
                own = {name: gradient for (of, name), gradient in gradients.items() if of == layer}
                checker.spill.put(moment, layer, own)

        alone = replace(now.mini_batch, only=frozenset(group))
        checker.model.run(alone, checker.together, checker.load(now.before), take)
        moments[group[0]] = moment
    return moments


def _made_of(now: ComparedStep, checker: Checker, layer: int, moments: Mapping[Place, str]) -> Parts | None:
    """Returns how often each part is contained in a layer's gradient; None where it is no sum of them."""
    names = [d.where for d in now.found[c.GRADIENTS].beyond if d.layer == layer]
    ours = _flat(checker.spill.get(f"gradients {now.number}", layer), names)
    parts = {place: _flat(checker.spill.get(moment, layer), names) for place, moment in moments.items()}
    earlier = checker.spill.get(f"gradients {now.number - 1}", layer)
    if earlier:
        parts[EARLIER] = _flat(earlier, names)
    return made_of(ours, {place: part for place, part in parts.items() if part is not None})


def _flat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | None:
    if not all(name in tensors for name in names):
        return None
    return torch.cat([tensors[name].double().flatten() for name in names])


def made_of(ours: Tensor | None, parts: Mapping[Place, Tensor]) -> Parts | None:
    """Returns the factors with which the ``parts`` add up to ``ours``; None where they do not, or not in one way."""
    parts = {place: part for place, part in parts.items() if part.any()}
    if ours is None or not parts or len(ours) <= len(parts):
        return None
    matrix = torch.stack(list(parts.values()), 1)
    if not torch.isfinite(matrix).all() or torch.linalg.cond(matrix) > 1e6:
        return None
    factors = torch.linalg.lstsq(matrix, ours[:, None]).solution[:, 0]
    rest = torch.linalg.vector_norm(matrix @ factors - ours)
    if not torch.isfinite(rest) or rest > FITS * torch.linalg.vector_norm(ours).clamp(min=1e-30):
        return None
    return dict(zip(parts, factors.tolist(), strict=True))


# -- what they say -----------------------------------------------------------------------------------------------------


def _in_words(parts: Parts, now: ComparedStep, checker: Checker) -> str:
    run = checker.run
    earlier = parts.pop(EARLIER, 0.0)
    if abs(earlier) > 1e-2:
        times = "" if abs(earlier - 1) < 1e-2 else f", {earlier:.3g} times"
        return f"the gradients of the step before are still there{times}: they were not cleared"
    out = {place for place, factor in parts.items() if abs(factor) < 1e-2}
    right = {place for place, factor in parts.items() if abs(factor - 1) < 1e-2}
    if out and out | right == parts.keys():
        return f"{_who(out, parts, run)} left out: not added to the gradients"
    if _are_means(parts, now, checker):
        return "each micro-batch counts as the mean of its own, whatever its weight: " + _each(parts, run)
    if not right and max(parts.values()) - min(parts.values()) < 1e-2:
        return f"every micro-batch counts {next(iter(parts.values())):.4g} times"
    return _each({place: factor for place, factor in parts.items() if place not in right}, run)


def _each(parts: Parts, run: VerifiedRun) -> str:
    by_factor: dict[str, list[Place]] = {}
    for place, factor in sorted(parts.items()):
        by_factor.setdefault(f"{factor:.3g}", []).append(place)
    return "; ".join(
        f"{run.micro_batches(places)} count{'s' if len(places) == 1 else ''} {factor} times"
        for factor, places in by_factor.items()
    )


def _who(places: set[Place], parts: Parts, run: VerifiedRun) -> str:
    """Returns "replica 1 was", where all of its micro-batches are meant, or "micro-batches 1, 2 were"."""
    replicas = {replica for replica, _ in places}
    if run.replicas > 1 and places == {place for place in parts if place[0] in replicas}:
        return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, sorted(replicas)))} " + (
            "were" if len(replicas) > 1 else "was"
        )
    return f"{run.micro_batches(places)} {'were' if len(places) > 1 else 'was'}"


def _are_means(parts: Parts, now: ComparedStep, checker: Checker) -> bool:
    """Returns whether the factors are inverse to the weights of the micro-batches, which are not all equal."""
    assert now.mini_batch is not None
    weights = {
        (r, m): checker.model.task.weight(targets)
        for r, replica in enumerate(now.mini_batch.micro_batches)
        for m, (_, targets) in enumerate(replica)
    }
    if checker.together is not Together.NOTHING or len(set(weights.values())) == 1 or not all(weights.values()):
        return False
    products = [factor * weights[place] for place, factor in parts.items()]
    return max(products) - min(products) < 1e-2 * max(map(abs, products))
