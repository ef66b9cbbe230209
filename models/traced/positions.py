"""Finds where a graph may be cut: between calls of modules, with what is alive there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .flatten import ROOT, Flat

WRAPPER = "module"  # of the names in nn_module_stack
Place = tuple[str, str]  # ("before" or "after", a call of a module)


@dataclass(frozen=True)
class CutPoint:
    """Describes one place where a graph may be cut.

    Attributes:
        position: of the first node behind it.
        places: between which calls of modules it lies.
        alive: the tensors that pass it, in order.
        bytes: of them, for the example.
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


def is_size(node: fx.Node) -> bool:
    """Returns whether the node is a number that follows from shapes, and no tensor."""
    return not isinstance(node.meta.get("val"), (Tensor, tuple, list))


def cuts_of(flat: Flat) -> dict[int, CutPoint]:
    """Returns every place where the graph may be cut, by position."""
    nodes = flat.nodes
    position = {node: number for number, node in enumerate(nodes)}
    closed = {
        inside
        for first, last in flat.forbidden
        for inside in range(position.get(first, -1) + 1, position.get(last, len(nodes) - 1) + 1)
    }
    last_use = {
        node: max((position.get(user, len(nodes)) for user in node.users), default=-1)
        for node in (*flat.inputs, *nodes)
    }
    cuts = {}
    for number, places in _places(nodes):
        if number in closed:
            continue
        alive = [
            *(n for n in flat.inputs if last_use[n] >= number),
            *(n for n in nodes[:number] if last_use[n] >= number),
        ]
        tensors = [node for node in alive if not is_size(node)]
        if all(map(_can_travel, tensors)) and all(map(_follows_from_shapes, set(alive) - set(tensors))):
            cuts[number] = CutPoint(number, places, tuple(tensors), sum(map(bytes_of, tensors)))
    return cuts


def _places(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, frozenset[Place]]]:
    """Yields the positions between two calls of modules, but for the very first and last."""
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
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return not any(free_unbacked_symbols(size) for size in value.shape)


def _follows_from_shapes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (bool, int, float)) or (value is not None and not free_unbacked_symbols(value))


def bytes_of(node: fx.Node) -> int:
    """Returns the bytes of a node's value for the example."""
    value = node.meta["val"]
    return prod(map(size_of, value.shape)) * int(value.dtype.itemsize)


def size_of(size: Any) -> int:
    """Returns a size for the example; 1 for one that depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.hint is not None else 1
