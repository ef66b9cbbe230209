"""Flattens a layer's output to tensors, and groups tensors again as the next layer gets them.

One tensor, or a tuple of tensors, needs no grouping. For anything else (nested tuples, lists and dicts, with None and
plain numbers and texts among the tensors) the grouping is a JSON text, which can be compared and sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from ...micro_batch import Tensors

T = TypeVar("T")


class Grouped(tuple[T, ...], Generic[T]):
    """Holds the tensors of a layer's output, or something for each of them, and how they were grouped."""

    grouping: str

    def __new__(cls, items: Iterable[T], grouping: str) -> Grouped[T]:
        made = super().__new__(cls, items)
        made.grouping = grouping
        return made


def grouping_of(items: Sequence[object]) -> str | None:
    """Returns the grouping; None for a plain tuple."""
    return getattr(items, "grouping", None)


def grouped(items: Iterable[T], grouping: str | None) -> tuple[T, ...]:
    """Returns the items with this grouping."""
    return tuple(items) if grouping is None else Grouped(items, grouping)


def grouped_like(items: Iterable[T], other: Sequence[object]) -> tuple[T, ...]:
    """Returns the items with the grouping of others."""
    return grouped(items, grouping_of(other))


def as_tensors(value: object) -> Tensors:
    """Returns a layer's output as a tuple of tensors, `Grouped` where it is more than a tensor or a tuple of them.

    Raises:
        TypeError: there is no tensor in the output, or something that cannot pass to another process.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    leaves, structure = pytree.tree_flatten(value, is_leaf=_is_leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Among the leaves a list stands for a tensor: a list in the output is part of the structure.
    others = [[] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    refused = [leaf for leaf in others if leaf != [] and type(leaf) not in (type(None), bool, int, float, str)]
    if refused or not tensors:
        found = type(refused[0] if refused else value).__name__
        raise TypeError(
            "a layer returns a tensor, or tensors in tuples, lists and dicts (keys: texts or whole numbers), with None "
            f"and plain numbers among them, not {found}: return its tensors, one beside the other"
        )
    return Grouped(tensors, json.dumps([_encoded(structure), others]))


def as_argument(tensors: Sequence[Tensor]) -> Any:
    """Returns the argument of a layer: one tensor alone, several as a tuple, `Grouped` ones as they were."""
    if isinstance(tensors, Grouped):
        structure, others = _decoded(tensors.grouping)
        following = iter(tensors)
        return pytree.tree_unflatten([next(following) if leaf == [] else leaf for leaf in others], structure)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def replace_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a layer's output or argument with ``function`` of each tensor in place of the tensor."""
    return pytree.tree_map_only(Tensor, function, value)


def _is_leaf(value: object) -> bool:
    """Returns whether the value is no plain container: another kind would not arrive as what it is."""
    if isinstance(value, dict) and any(type(key) not in (str, int) for key in value):
        return True
    return type(value) not in (tuple, list, dict)


@lru_cache(maxsize=256)
def _encoded(structure: pytree.TreeSpec) -> str:
    return pytree.treespec_dumps(structure)


@lru_cache(maxsize=256)
def _decoded(grouping: str) -> tuple[pytree.TreeSpec, list[Any]]:
    structure, others = json.loads(grouping)
    return pytree.treespec_loads(structure), others
