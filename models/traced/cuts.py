"""Chooses where a traced module is cut into layers: places with few live bytes, the same in both graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from .flatten import Flat
from .positions import CutPoint, bytes_of, cuts_of, is_size

FEWEST, MOST = 6, 96  # layers, where the module has so many places
NEAR = 4  # weights to either side among which a place must not be a bad one


@dataclass(frozen=True)
class Boundary:
    """Holds one chosen place, in the training graph and in that for evaluation."""

    training: CutPoint
    evaluation: CutPoint


def choose_cuts(training: Flat, evaluation: Flat) -> list[Boundary]:
    """Returns the boundaries between layers, in order.

    Between two weights the place with the fewest live bytes counts, the outermost of equal ones. It is left out where
    it has more live bytes than places near it on both sides, as inside a residual branch.
    """
    matched = _matched(cuts_of(training), cuts_of(evaluation))
    candidates = [min(gap, key=_preference) for gap in _gaps(training, matched) if gap]
    good = [number for number in range(len(candidates)) if not _is_bump(candidates, number)]
    others = sorted(set(range(len(candidates))) - set(good), key=lambda number: candidates[number].training.bytes)
    chosen = sorted([*good, *others[: max(0, FEWEST - 1 - len(good))]])
    return _merged(training, [candidates[number] for number in chosen])


def _matched(training: dict[int, CutPoint], evaluation: dict[int, CutPoint]) -> list[Boundary]:
    """Returns the places that both graphs have, in an order that is the same in both."""
    by_place = {place: cut for cut in evaluation.values() for place in cut.places}
    boundaries: list[Boundary] = []
    for cut in training.values():
        found = [by_place[place] for place in sorted(cut.places) if place in by_place]
        last = boundaries[-1].evaluation.position if boundaries else -1
        if found and found[0].position >= last:
            boundaries.append(Boundary(cut, found[0]))
    return boundaries


def _gaps(flat: Flat, boundaries: Sequence[Boundary]) -> list[list[Boundary]]:
    """Groups the places by the number of weights in front of them; those before the first and behind the last go."""
    weights = [
        number
        for number, node in enumerate(flat.nodes)
        if any(argument in flat.held and argument.meta["val"].dim() > 1 for argument in node.all_input_nodes)
    ]
    gaps: list[list[Boundary]] = [[] for _ in range(len(weights) + 1)]
    for boundary in boundaries:
        gaps[sum(weight < boundary.training.position for weight in weights)].append(boundary)
    return gaps[1:-1]


def _preference(boundary: Boundary) -> tuple[int, int, int]:
    depth = min(call.count(".") for _, call in boundary.training.places)
    return boundary.training.bytes, depth, -boundary.training.position


def _is_bump(candidates: Sequence[Boundary], number: int) -> bool:
    before = [near.training.bytes for near in candidates[max(0, number - NEAR) : number]]
    after = [near.training.bytes for near in candidates[number + 1 : number + 1 + NEAR]]
    here = candidates[number].training.bytes
    return bool(before and after) and here > max(min(before), min(after))


def _merged(flat: Flat, boundaries: list[Boundary]) -> list[Boundary]:
    """Leaves out boundaries until there are few enough, each time where the two layers beside it cost least."""
    nodes = flat.nodes
    ends = [0, *(boundary.training.position for boundary in boundaries), len(nodes)]
    costs = [sum(map(_cost, nodes[first:last])) for first, last in pairwise(ends)]
    boundaries = list(boundaries)
    while len(costs) > MOST:
        at = min(range(len(boundaries)), key=lambda number: costs[number] + costs[number + 1])
        costs[at : at + 2] = [costs[at] + costs[at + 1]]
        del boundaries[at]
    return boundaries


def _cost(node: fx.Node) -> float:
    """Returns the FLOPs of matrix products and convolutions, and one for each byte that comes out."""
    if is_size(node):
        return 0.0
    value = node.meta["val"]
    made = 0 if isinstance(value, (tuple, list)) else bytes_of(node)
    weights = [argument.meta["val"] for argument in node.all_input_nodes if argument.op == "placeholder"]
    sizes = [weight.numel() for weight in weights if hasattr(weight, "dim") and weight.dim() > 1]
    return float(made + (made * max(map(int, sizes)) ** 0.5 if sizes else 0))
