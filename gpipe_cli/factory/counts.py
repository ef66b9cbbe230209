"""Puts numbers ahead that a module's code counts, so that few calls show what it does after many."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn

Place = tuple[int, str]  # (id of what holds a number, attribute)


class Counts:
    """Knows where a module's code may count: in modules, what they hold, their classes, files and closures."""

    def __init__(self, module: nn.Module) -> None:
        parts = [*module.modules()]
        held = [value for part in parts for value in vars(part).values()]
        kinds = {kind for part in parts for kind in type(part).__mro__ if not kind.__module__.startswith("torch")}
        files = [sys.modules[kind.__module__] for kind in kinds - {object} if kind.__module__ in sys.modules]
        cells = [cell for value in held for cell in getattr(value, "__closure__", None) or ()]
        self._holders: dict[int, Any] = {id(holder): holder for holder in (*parts, *held, *kinds, *files, *cells)}

    def values(self) -> dict[Place, Any]:
        """Returns a copy of each number."""
        found = {}
        for place, holder in self._holders.items():
            for name in {*getattr(holder, "__dict__", ()), *getattr(type(holder), "__slots__", ()), "cell_contents"}:
                value: Any = getattr(holder, name, None)
                if _is_number(value):
                    found[place, name] = value + 0
        return found

    def put(self, values: Mapping[Place, Any]) -> None:
        """Sets numbers."""
        for (place, name), value in values.items():
            setattr(self._holders[place], name, value)

    def named(self, places: Mapping[Place, Any]) -> str:
        """Returns the classes and attributes that hold these numbers."""
        holders = ((self._holders[place], name) for place, name in places)
        return ", ".join(f"{getattr(holder, '__name__', type(holder).__name__)}.{name}" for holder, name in holders)


def _is_number(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return not isinstance(value, nn.Parameter) and value.ndim <= 1 and len(value.reshape(-1)) == 1
    return isinstance(value, Real) and not isinstance(value, bool)
