"""Reads one section of the configuration into its dataclass, and reports wrong types, limits and unknown keys.

The dataclass's annotations define all checks: ``int``, ``float``, ``bool``, ``str``, ``Literal[...]``,
``list[int]``, ``list[str]``, unions of these with ``None``, and `Limit` inside ``Annotated``.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpipe_cli.errors import Problems

T = TypeVar("T")
LONGEST_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True)
class Limit:
    """Describes the range of a number; `infinite`: infinity is in it."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    multiple_of: int = 1
    infinite: bool = False

    def allows(self, value: float) -> bool:
        if isinstance(value, float) and math.isinf(value):
            return self.infinite and value > 0
        if isinstance(value, int) and value % self.multiple_of:
            return False
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def in_words(self, kind: str, value: object) -> str:
        """Returns what to type in place of ``value``: "a whole number, at least 1".

        Args:
            kind: "a number" or "a whole number".
        """
        too_large = isinstance(value, (int, float)) and self.at_most < value
        if isinstance(value, float) and math.isinf(value) and kind == "a number":
            kind = "a finite number"
        elif too_large:
            return f"{kind}, at most {self.at_most}"
        bounds = (("at least", self.at_least), ("more than", self.above), ("less than", self.below))
        words = [f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound)]
        multiple = [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return ", ".join([kind, *([" and ".join(words)] if words else []), *multiple])


LARGEST = 10**15  # of a count
FOREVER = 10**9  # seconds: 31 years, which every timer of the system takes
Count = Annotated[int, Limit(at_least=1, at_most=LARGEST)]
CountOrZero = Annotated[int, Limit(at_least=0, at_most=LARGEST)]
Number = Annotated[float, Limit()]
NotNegative = Annotated[float, Limit(at_least=0)]
Positive = Annotated[float, Limit(above=0)]
Seconds = Annotated[float, Limit(above=0, at_most=FOREVER)]
Share = Annotated[float, Limit(above=0, below=1)]
ShareOrZero = Annotated[float, Limit(at_least=0, below=1)]


@dataclass(frozen=True)
class Length:
    """Describes the number of items of a list."""

    least: int = 1
    most: float = math.inf

    def allows(self, value: list[Any]) -> bool:
        return self.least <= len(value) <= self.most

    def in_words(self, kind: str, value: object) -> str:
        """Returns what to type: "a list of 2 items such as [0.5,0.9], each a number"."""
        if self.least == self.most:
            return kind.replace("a list", f"a list of {self.least} items", 1).replace("[3,5,4]", "[3,5]")
        return kind if value else f"{kind}, and not empty"


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
    problems = Problems()
    section = read_what_fits(kind, values, prefix, problems)
    problems.refuse()
    return section


def read_what_fits(kind: type[T], values: object, prefix: str, problems: Problems) -> T:
    """Makes a ``kind`` as `read_section` does; one whose attributes are the keys with right values alone.

    Args:
        problems: gets one line for each key that is unknown, missing or has a wrong value.
    """
    section = object.__new__(kind)
    if not isinstance(values, Mapping):
        problems.append(f"{prefix} must be a section with keys, not {shown(values)}")
        return section
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # T is always a dataclass here
    dot = f"{prefix}." if prefix else ""
    problems += [unknown_key(f"{dot}{key}", [dot + name for name in names]) for key in values if key not in names]
    problems += [
        f"{dot}{name} is missing: every key of {prefix} needs a value"
        for name in names
        if name not in values and not problems.about(f"{dot}{name}")
    ]
    for name, value in read_values({n: hints[n] for n in names if n in values}, values, dot, problems).items():
        object.__setattr__(section, name, value)  # the dataclass is frozen
    return section


def read_values(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str, problems: Problems) -> dict[str, Any]:
    """Returns the values that fit their types, converted; adds a line to ``problems`` for each other one.

    Args:
        hints: the type of each key; one that is not in ``values`` is passed over.
        prefix: of the keys in messages, with its dot.
    """
    taken = {}
    for name, hint in hints.items():
        if name not in values:
            continue
        try:
            taken[name] = _fit(values[name], hint)
        except _Misfit:
            problems.append(f"{prefix}{name}={shown(values[name])}: use {_wanted(hint, values[name])}")
    return taken


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
    """Returns a value as it is typed on the command line, shortened if it is long."""
    text = _typed(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def _typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_typed(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and abs(value) >= 10**300:
        return "(hundreds of digits)"
    return str(value).replace("\n", "\\n")


def _fit(value: object, hint: Any) -> Any:
    """Returns the value converted to the type: 1e5 fits a whole number, and a whole number fits a float."""
    origin = get_origin(hint)
    if hint is Any:
        return value
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
    if isinstance(value, bool) or kind in (bool, str, types.NoneType):
        if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
    elif kind is int and isinstance(value, int):
        return value
    elif kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif kind is float and isinstance(value, (int, float)) and not math.isnan(value):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            return float(value)
    raise _Misfit


def _wanted(hint: Any, value: object = None) -> str:
    """Returns the type in words: "a whole number, at least 1".

    Args:
        value: the one that does not fit, if it decides what to say.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        base, limit = get_args(hint)
        return str(limit.in_words(_wanted(base, value), value))
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part, value) for part in get_args(hint))
    if origin is Literal:
        return " or ".join(_typed(choice) for choice in get_args(hint))
    if origin is list:
        return _wanted_list(get_args(hint)[0], value)
    if hint is str and isinstance(value, (int, float)):
        return f"a text (a {'word' if isinstance(value, bool) else 'number'} in quotes: \"'{_typed(value)}'\")"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return words[hint]


def _wanted_list(item: Any, value: object) -> str:
    if item is str and isinstance(value, (list, tuple)) and any(isinstance(part, bool) for part in value):
        return "a list such as ['no','de'] (YAML reads the bare words no and yes as false and true)"
    if item is str:
        return f"a list such as [{value if isinstance(value, str) and value.isalnum() else 'a,b'}]"
    if get_origin(item) is Literal:
        return f"a list of {_wanted(item)}, as [{','.join(map(str, get_args(item)))}]"
    whole = get_args(item)[0] is int if get_origin(item) is Annotated else item is int
    return f"a list such as {'[3,5,4]' if whole else '[0.5,0.9]'}, each {_wanted(item)}"
