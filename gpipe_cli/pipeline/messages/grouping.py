"""Flattens what a layer returns to tensors, and groups tensors again as the next layer gets them.

One tensor, or a tuple of tensors, needs no grouping. For anything else (nested tuples, lists and dicts, with None and
plain numbers and texts among the tensors) the grouping is a JSON text, which can be compared and sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from torch import Tensor

from ...micro_batch import Tensors

T = TypeVar("T")
_TENSOR = "tensor"  # stands for a tensor in the JSON text; other texts are {"text": …}


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
    tensors: list[Tensor] = []
    grouping = json.dumps(_described(value, "", tensors))
    if not tensors:
        raise _refusal(value, "")
    return Grouped(tensors, grouping)


def as_argument(tensors: Sequence[Tensor]) -> Any:
    """Returns the argument of a layer: one tensor alone, several as a tuple, `Grouped` ones as they were."""
    if isinstance(tensors, Grouped):
        return _built(_decoded(tensors.grouping), iter(tensors))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def replace_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a layer's output or argument with ``function`` of each tensor in place of the tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: replace_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [replace_tensors(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _described(value: object, place: str, tensors: list[Tensor]) -> Any:
    """Returns a value in the form of JSON, and adds its tensors to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    kind = type(value)  # not a class derived from it, which would not arrive as what it is
    if value is None or kind in (int, float, bool):
        return value
    if isinstance(value, str) and kind is str:
        return {"text": value}
    if isinstance(value, (tuple, list)) and kind in (tuple, list):
        items = [_described(item, f"{place}[{number}]", tensors) for number, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict) and kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _described(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()]}
    raise _refusal(value, place)


def _refusal(value: object, place: str) -> TypeError:
    found = "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, dict):
        found = f"a {type(value).__name__} with the keys {', '.join(map(repr, value))}" if value else "an empty dict"
    where = f" at output{place}" if place else ""
    return TypeError(
        "a layer returns a tensor, or tensors in tuples, lists and dicts (keys: texts or whole numbers), with None and "
        f"plain numbers among them, not {found}{where}: return its tensors, one beside the other"
    )


@lru_cache(maxsize=256)
def _decoded(grouping: str) -> Any:
    return json.loads(grouping)


def _built(description: Any, tensors: Iterator[Tensor]) -> Any:
    if description == _TENSOR:
        return next(tensors)
    if isinstance(description, list):
        return [_built(item, tensors) for item in description]
    if isinstance(description, dict):
        ((kind, content),) = description.items()
        if kind == "text":
            return content
        if kind == "tuple":
            return tuple(_built(item, tensors) for item in content)
        return {key: _built(item, tensors) for key, item in content}
    return description
