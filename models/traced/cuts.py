"""Chooses where a traced module is cut into layers: between calls of modules, where few bytes pass, in both graphs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .flatten import ROOT, WRAPPER, Flat, enter, is_view_of_parameter

FEWEST, MOST = 6, 96  # layers, where the module has so many places; of more, some are left out
NEAR = 4  # candidates on either side with which a place is compared
Place = tuple[str, str]  # ("before" or "after", a call of a module)


@dataclass(frozen=True)
class CutPoint:
    """Describes one place where a graph may be cut.

    Attributes:
        position: index of the first node behind it.
        places: between which calls of modules it lies.
        alive: the tensors that pass it, in order.
        bytes: their bytes, for the example.
    """

    position: int
    places: frozenset[Place]
    alive: tuple[fx.Node, ...]
    bytes: int


def calls_of(node: fx.Node) -> list[str]:
    """Returns the calls of modules around a node, the outermost first, such as ``layer1``, ``layer1.0@1``."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    names = [key.removeprefix(ROOT).removeprefix(WRAPPER).removeprefix(".") for key in stack if key.startswith(ROOT)]
    return [name for name in names if name]


def _is_size(node: fx.Node) -> bool:
    """Returns whether the node is a number that follows from shapes, and no tensor."""
    return not isinstance(node.meta.get("val"), (Tensor, tuple, list))


def cuts_of(flat: Flat) -> dict[int, CutPoint]:
    """Returns every place where the graph may be cut, by position."""
    nodes = flat.nodes
    position = {node: number for number, node in enumerate(nodes)}
    closed = set[int]()  # places between a tensor and a later change of it in place
    for first, last in flat.forbidden:
        closed |= {*range(position.get(first, -1) + 1, position.get(last, len(nodes) - 1) + 1)}
    last_use = {
        node: max((position.get(user, len(nodes)) for user in node.users), default=-1)
        for node in (*flat.inputs, *nodes)
    }
    # A part enters contexts and takes views of parameters again.
    made_again = {node for node in nodes if node.target is enter or is_view_of_parameter(flat, node)}
    cuts = {}
    for number, places in _places(nodes):
        if number in closed:
            continue
        alive = [
            *(n for n in flat.inputs if last_use[n] >= number),
            *(n for n in nodes[:number] if last_use[n] >= number and n not in made_again),
        ]
        tensors = [node for node in alive if not _is_size(node)]
        if not all(map(_can_travel, tensors)):
            continue
        sizes = sizes_of(tensors)
        if all(_follows_from(sizes, node) for node in set(alive) - set(tensors)):
            cuts[number] = CutPoint(number, places, tuple(tensors), sum(map(_bytes_of, tensors)))
    return cuts


def _places(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, frozenset[Place]]]:
    """Yields each position where a call of a module begins or ends, with its places."""
    stacks = [calls_of(node) for node in nodes]
    known: list[str] = []
    for number, stack in enumerate(stacks):
        if not stack and nodes[number].meta.get("nn_module_stack") is None:
            stacks[number] = known  # torch.export's own helpers stand where they are needed
        known = stacks[number]
    for number in range(1, len(nodes)):
        before, after = stacks[number - 1], stacks[number]
        places = {("after", call) for call in before if call not in after}
        places |= {("before", call) for call in after if call not in before}
        if places:
            yield number, frozenset(places)


def _can_travel(node: fx.Node) -> bool:
    """Returns whether a value can pass a cut: a dense real tensor whose sizes do not depend on values."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return not any(free_unbacked_symbols(size) for size in value.shape)


def _follows_from(sizes: Mapping[str, object], node: fx.Node) -> bool:
    """Returns whether a number can be computed again from these sizes of tensors."""
    value = node.meta.get("val")
    if isinstance(value, (bool, int, float)):
        return True
    return value is not None and not free_unbacked_symbols(value) and all(leaf in sizes for leaf in _leaves(node))


def _leaves(size: fx.Node) -> list[str]:
    """Returns the sizes of tensors from which a number follows, as expressions."""
    if size.target is torch.ops.aten.sym_size.int:
        return [str(size.meta["val"])]
    return [leaf for argument in size.all_input_nodes for leaf in _leaves(argument)]


def sizes_of(tensors: Sequence[fx.Node]) -> dict[str, tuple[fx.Node, int]]:
    """Returns where each computed size stands: expression -> (tensor, dimension)."""
    return {
        str(size): (tensor, dimension)
        for tensor in reversed(tensors)
        for dimension, size in reversed([*enumerate(tensor.meta["val"].shape)])
        if isinstance(size, torch.SymInt)
    }


def _bytes_of(node: fx.Node) -> int:
    """Returns the bytes of a value that can pass a cut, for the example."""
    value = node.meta["val"]
    sizes: list[Any] = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return prod(map(int, sizes)) * int(value.dtype.itemsize)


# -- choosing ----------------------------------------------------------------------------------------------------------


Boundary = tuple[CutPoint, CutPoint]  # one place, in the training graph and in that for evaluation


def choose_cuts(training: Flat, evaluation: Flat) -> list[Boundary]:
    """Returns the boundaries between layers, in order.

    Between two weights the place with the fewest live bytes counts, the outermost of equal ones. It is left out where
    it has more live bytes than places near it on both sides, as inside a residual branch.
    """
    matched = _matched(cuts_of(training), cuts_of(evaluation))
    candidates = [min(gap, key=_preference) for gap in _gaps(training, matched) if gap]
    good = [number for number in range(len(candidates)) if not _is_bump(candidates, number)]
    others = sorted(set(range(len(candidates))) - set(good), key=lambda number: candidates[number][0].bytes)
    chosen = sorted([*good, *others[: max(0, FEWEST - 1 - len(good))]])
    return [candidates[number] for number in chosen[:: ceil((len(chosen) + 1) / MOST)]]


def _matched(training: dict[int, CutPoint], evaluation: dict[int, CutPoint]) -> list[Boundary]:
    """Returns the places that both graphs have, as cuts of both, in the order of both."""
    by_place = {place: cut for cut in evaluation.values() for place in cut.places}
    boundaries: list[Boundary] = []
    for cut in training.values():
        found = [by_place[place] for place in sorted(cut.places) if place in by_place]
        last = boundaries[-1][1].position if boundaries else -1
        if found and found[0].position >= last:
            boundaries.append((cut, found[0]))
    return boundaries


def _gaps(flat: Flat, boundaries: Sequence[Boundary]) -> list[list[Boundary]]:
    """Groups the places by the number of weights before them. Those before the first or after the last are left out."""
    weights = [
        number
        for number, node in enumerate(flat.nodes)
        if any(argument in flat.held and argument.meta["val"].dim() > 1 for argument in node.all_input_nodes)
    ]
    gaps: list[list[Boundary]] = [[] for _ in range(len(weights) + 1)]
    for boundary in boundaries:
        gaps[sum(weight < boundary[0].position for weight in weights)].append(boundary)
    return gaps[1:-1]


def _preference(boundary: Boundary) -> tuple[int, int, int]:
    """Returns a sort key: fewest bytes first, then outermost calls, then the last position."""
    cut, _ = boundary
    depth = min(call.count(".") for _, call in cut.places)
    return cut.bytes, depth, -cut.position


def _is_bump(candidates: Sequence[Boundary], number: int) -> bool:
    """Returns whether more bytes pass a candidate than the fewest among its neighbours, on both sides."""
    sizes = [cut.bytes for cut, _ in candidates]
    before, after = sizes[max(0, number - NEAR) : number], sizes[number + 1 : number + 1 + NEAR]
    return bool(before and after) and sizes[number] > max(min(before), min(after))
