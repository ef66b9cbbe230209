"""Checks values of the configuration by pydantic, against type hints with limits, and names the nearest known key.

A value is never converted to another type, but for two: 1e5 is a whole number, and a whole number is a number.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import AllowInfNan, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from gpipe_cli.errors import ConfigurationError, Problems

T = TypeVar("T")
LONGEST_SHOWN = 60  # characters of a wrong value in a message
# A text that Hydra reads as a text without quotes.
PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
RULES = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

Bytes = Annotated[float, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0)]  # also as 16GB, 16GiB
Count = Annotated[int, Field(ge=1, le=10**15)]
DEEPEST = 20_000  # layers: a list of more would fill the memory before it could be counted
Depth = Annotated[int, Field(ge=1, le=DEEPEST)]
CountOrZero = Annotated[int, Field(ge=0, le=10**15)]
Size = Annotated[int, Field(ge=1, le=2**20)]  # of a layer's vectors, a text, a cluster
Examples = Annotated[int, Field(ge=1, le=10**7)]  # of a mini-batch: more would fill the memory of any machine
Tokens = Annotated[int, Field(ge=1, le=10**8)]  # likewise
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # hashed as a 64-bit integer
Vocabulary = Annotated[int, Field(ge=8, le=2**31 - 1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=10**9)]  # 31 years, which every timer of the system takes
SecondsOrZero = Annotated[float, Field(ge=0, le=10**9)]
Share = Annotated[float, Field(gt=0, lt=1)]
ShareOrZero = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[float, Field(ge=0, le=1)]
PartAboveZero = Annotated[float, Field(gt=0, le=1)]
Even = Annotated[int, Field(ge=2, multiple_of=2)]
Pixels = Annotated[int, Field(ge=8, le=65_536)]  # of a side
Names = Annotated[Sequence[str], Field(min_length=1)]
Temperature = Annotated[float, Field(ge=1), AllowInfNan(True)]


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
    hints, dot = get_type_hints(kind, include_extras=True), f"{prefix}." if prefix else ""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    problems = Problems(
        unknown_key(f"{dot}{key}", [dot + each for each in names]) for key in values if key not in names
    )
    problems += [f"{dot}{name} is missing: every key of {prefix} needs a value" for name in names if name not in values]
    fitting = read_values({name: hints[name] for name in names}, values, dot, problems)
    problems.refuse()
    return kind(**fitting)


def read_values(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str, problems: Problems) -> dict[str, Any]:
    """Returns the values that fit their types; adds a line to ``problems`` for each other one.

    Args:
        hints: the type of each key; one that is not in ``values`` is passed over.
        prefix: text before the keys in messages, with its dot.
    """
    taken = {}
    for name in filter(values.__contains__, hints):
        value, expected, wrong = values[name], TypeAdapter(hints[name], config=RULES), ""
        for tried in [value, int(value)] if isinstance(value, float) and value.is_integer() else [value]:
            try:
                taken[name] = expected.validate_python(tried)
                break
            except ValidationError as error:
                wrong = _in_words(error, hints[name])
        else:
            if "string" in wrong and any(each is False for each in (value if isinstance(value, Iterable) else [value])):
                wrong += "; YAML reads no as false: write 'no'"  # the code of Norwegian
            problems.append(f"{prefix}{name}={shown(value)}: {wrong}")
    return taken


def _in_words(error: ValidationError, hint: Any) -> str:
    """Returns what a key takes, in words: "should be 'auto' or a valid integer"."""
    told = [each["msg"] for each in error.errors(include_url=False)]
    told = ["use a list" if "Sequence" in message else message for message in told]  # a class of Python's
    told = ["use a number of bytes, as 16GB" if "byte " in message else message for message in told]
    told += ["Input should be null"] if type(None) in get_args(hint) else []
    return " or ".join(dict.fromkeys(told)).replace(" or Input should be ", " or ").removeprefix("Input ")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns the message that refuses a key and names the nearest known ones."""
    names = list(dict.fromkeys(known))
    if near := nearest(key, names):
        return f"there is no key {key}; did you mean {' or '.join(near)}?"
    section = key.rpartition(".")[0]
    there = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    there = there or list(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"there is no key {key}; {section or 'here'} has: {', '.join(there)}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Returns at most three of ``known`` that look like ``word``, whatever the case of their letters.

    In a section that exists, only its own keys count, compared by their last part: a long section name would make them
    all look alike.
    """
    names = {name.lower(): name for name in known}
    section, _, last = word.lower().rpartition(".")
    siblings = {name.rpartition(".")[2]: names[name] for name in names if name.rpartition(".")[0] == section}
    return [siblings[near] for near in difflib.get_close_matches(last, siblings, n=3, cutoff=0.6)]


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def shown(value: object) -> str:
    """Returns a value as the command line writes it (`typed`), for messages: at most LONGEST_SHOWN characters."""
    text = typed(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def typed(value: object) -> str:
    """Returns a value as Hydra's command line reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(typed(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(item)}" for key, item in value.items()) + "}"
    return str(value)
