"""Reads one section of the configuration into its dataclass, and reports wrong types, limits and unknown keys.

The dataclass's annotations define all checks: ``int``, ``float``, ``bool``, ``str``, ``Literal[...]``,
``list[int]``, ``list[str]``, unions of these with ``None``, and `Limit` inside ``Annotated``.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpipe_cli.errors import ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """Describes the range of a number."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def allows(self, value: float) -> bool:
        return value >= self.at_least and self.above < value < self.below

    def __str__(self) -> str:
        least = f"at least {self.at_least:g}" if self.at_least > -math.inf else f"more than {self.above:g}"
        return least if self.below == math.inf else f"{least} and less than {self.below:g}"


Count = Annotated[int, Limit(at_least=1)]
CountOrZero = Annotated[int, Limit(at_least=0)]
Positive = Annotated[float, Limit(above=0)]
Share = Annotated[float, Limit(above=0, below=1)]


class _Misfit(ValueError):
    """Raised when a value does not fit a type."""


def read_section(kind: type[T], values: object, prefix: str) -> T:
    """Makes a ``kind`` from a mapping that must have exactly its fields as keys.

    Args:
        kind: a dataclass.
        values: the section of the configuration.
        prefix: the section's name, empty for the top level.

    Raises:
        ConfigurationError: it has one line for each key that is unknown, missing or has a wrong value.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{prefix} must be a section with keys, not {shown(values)}")
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # T is always a dataclass here
    dot = f"{prefix}." if prefix else ""
    problems = [unknown_key(f"{dot}{key}", [dot + name for name in names]) for key in values if key not in names]
    problems += [f"{dot}{name} is missing: every key of {prefix} needs a value" for name in names if name not in values]
    taken = {}
    for name in names:
        if name in values:
            try:
                taken[name] = _fit(values[name], hints[name])
            except _Misfit:
                problems.append(f"{dot}{name}={shown(values[name])}: use {_wanted(hints[name])}")
    if problems:
        raise ConfigurationError("\n".join(problems))
    return kind(**taken)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns the message that refuses a key and names what to type instead."""
    names = list(dict.fromkeys(known))
    if near := nearest(key, names):
        return f"there is no key {key}; did you mean {' or '.join(near)}?"
    section = key.rpartition(".")[0]
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    if section and siblings:
        return f"there is no key {key}; {section} has: {', '.join(name.rpartition('.')[2] for name in siblings)}"
    return f"there is no key {key}; sections and keys: {', '.join(dict.fromkeys(n.partition('.')[0] for n in names))}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Returns at most three of ``known`` that look like ``word``; a difference of case alone is nearest of all.

    In a section that exists, only its own keys count, compared by their last part: a long section name would make them
    all look alike.
    """
    names = {name.lower(): name for name in known}
    lowered = word.lower()
    if lowered in names:
        return [names[lowered]]
    section, _, last = lowered.rpartition(".")
    siblings = {name.rpartition(".")[2]: names[name] for name in names if name.rpartition(".")[0] == section}
    if siblings:
        return [siblings[near] for near in difflib.get_close_matches(last, siblings, n=3, cutoff=0.6)]
    as_deep = [name for name in names if name.count(".") == word.count(".")]
    return [names[near] for near in difflib.get_close_matches(lowered, as_deep, n=3, cutoff=0.75)]


def shown(value: object) -> str:
    """Returns a value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(shown(item) for item in value) + "]"
    return str(value)


def _fit(value: object, hint: Any) -> Any:
    """Returns the value converted to the type: 1e5 fits a whole number, and a whole number fits a float."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, limit = get_args(hint)
        fitted = _fit(value, base)
        if not limit.allows(fitted):
            raise _Misfit
        return fitted
    if origin in (Union, types.UnionType):
        return _fit_any(value, get_args(hint))
    if origin is Literal:
        choices = [choice for choice in get_args(hint) if choice == value and type(choice) is type(value)]
        if not choices:
            raise _Misfit
        return choices[0]
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise _Misfit
        return [_fit(item, get_args(hint)[0]) for item in value]
    return _fit_plain(value, hint)


def _fit_any(value: object, hints: Iterable[Any]) -> Any:
    for hint in hints:
        try:
            return _fit(value, hint)
        except _Misfit:
            continue
    raise _Misfit


def _fit_plain(value: object, kind: type) -> Any:
    if kind in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if kind is int and float(value).is_integer():
            return int(value)
        if kind is float and not math.isnan(value):
            return float(value)
    elif kind in (bool, str) and isinstance(value, kind):
        return value
    elif kind is types.NoneType and value is None:
        return None
    raise _Misfit


def _wanted(hint: Any) -> str:
    """Returns the type in words: "a whole number, at least 1"."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, limit = get_args(hint)
        return f"{_wanted(base)}, {limit}"
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part) for part in get_args(hint))
    if origin is Literal:
        return " or ".join(str(choice) for choice in get_args(hint))
    if origin is list:
        return _wanted_list(get_args(hint)[0])
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return words[hint]


def _wanted_list(item: Any) -> str:
    if item is str:
        return "a list such as [a,b]"
    if get_origin(item) is Literal:
        return f"a list of {_wanted(item)}, as [{','.join(map(str, get_args(item)))}]"
    return f"a list such as [3,5,4], each {_wanted(item)}"
