"""Renders an item as a text of any language: lists, amounts, dates and times by CLDR's own patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

from .strings import LocaleStrings

Item = tuple[Any, ...]
"""A language-free content: ("list", "or", (item, item)), ("unit", "3.5", "length-meter"), ("date", "full", day) …

Numbers are decimal strings, days are `date.toordinal()`, times are seconds after midnight."""


def render(item: Item, strings: LocaleStrings) -> str | None:
    """Returns the text of `item`, or None if the language lacks a string of its own for it."""
    try:
        return _RENDER[item[0]](strings, *item[1:])
    except KeyError:
        return None


def _name(strings: LocaleStrings, kind: str, key: str) -> str:
    return strings.names[kind, key]


def _list(strings: LocaleStrings, style: str, items: tuple[Item, ...]) -> str:
    texts = [_RENDER[item[0]](strings, *item[1:]) for item in items]
    patterns = strings.lists[style]
    if len(texts) == 2:
        return _fill(patterns["2"], *texts)
    joined = _fill(patterns["end"], texts[-2], texts[-1])
    for text in reversed(texts[1:-2]):
        joined = _fill(patterns["middle"], text, joined)
    return _fill(patterns["start"], texts[0], joined)


def _money(strings: LocaleStrings, number: str, currency: str) -> str:
    # CLDR's rule: a currency without plural names has its plain name for every number.
    names = strings.currencies.get(currency) or {"other": strings.names["currency", currency]}
    form = strings.plural(Decimal(number))
    pattern = strings.amount.get(form, strings.amount["other"])
    return _fill(pattern, format_number(number, strings), names.get(form, names["other"]))


def _unit(strings: LocaleStrings, number: str, unit: str) -> str:
    return _fill(_plural(strings, strings.units[unit], number), format_number(number, strings))


def _relative(strings: LocaleStrings, number: str, field: str, direction: str) -> str:
    return _fill(_plural(strings, strings.relative[field, direction], number), format_number(number, strings))


def _language_in_territory(strings: LocaleStrings, language: str, territory: str) -> str:
    return f"{strings.names['language', language]} ({strings.names['territory', territory]})"


def _compact(strings: LocaleStrings, number: str) -> str:
    """Returns a text such as "5 million"; `number` has two significant digits at most, exact in lakh and million."""
    magnitude = "1" + "0" * (len(number) - 1)
    pattern = strings.compact["other"][magnitude]
    zeros = pattern.count("0")
    if pattern.strip("0") == "":  # the language writes this magnitude in full
        raise KeyError
    shown = format(Decimal(number).scaleb(zeros - len(number)).normalize(), "f")
    pattern = strings.compact.get(strings.plural(Decimal(shown)), strings.compact["other"]).get(magnitude, pattern)
    return re.sub("0+", format_number(shown, strings), pattern, count=1)


def _date(strings: LocaleStrings, style: str, day: int) -> str:
    return strings.patterns[style] % _Fields(strings, day=day)


def _date_time(strings: LocaleStrings, style: str, day: int, seconds: int) -> str:
    time = strings.patterns["time"] % _Fields(strings, seconds=seconds)
    return _fill(strings.patterns["date and time"], time, _date(strings, style, day))


def _zone_time(strings: LocaleStrings, seconds: int, zone: str) -> str:
    return strings.patterns["zone time"] % _Fields(strings, seconds=seconds, zone=strings.names["zone", zone])


_RENDER: dict[str, Callable[..., str]] = {
    "name": _name,
    "list": _list,
    "money": _money,
    "unit": _unit,
    "relative": _relative,
    "compact": _compact,
    "language in territory": _language_in_territory,
    "date": _date,
    "date and time": _date_time,
    "zone time": _zone_time,
}


class _Fields(dict[str, str]):
    """Looks up the fields of a DateTimePattern; a field without a word of the language is missing."""

    def __init__(self, strings: LocaleStrings, day: int = 1, seconds: int = 0, zone: str = "") -> None:
        self._strings, self._date, self._zone = strings, date.fromordinal(day), zone
        self._hour, self._minute, self._second = seconds // 3600, seconds // 60 % 60, seconds % 60

    def __missing__(self, field: str) -> str:
        if field in ("MMMM", "LLLL"):
            return self._strings.fields[field][self._date.month]
        if field in ("EEEE", "cccc"):
            return self._strings.fields[field][self._date.weekday()]
        if field == "a":
            return self._strings.fields["a"]["pm" if self._hour >= 12 else "am"]
        if field == "G":
            return self._strings.fields["G"][1]
        if field == "zzzz":
            return self._zone
        numbers = {"y": self._date.year, "M": self._date.month, "d": self._date.day, "H": self._hour,
                   "h": (self._hour - 1) % 12 + 1, "m": self._minute, "s": self._second}  # fmt: skip
        return str(numbers[field[0]]).zfill(len(field))


def _fill(pattern: str, *values: str) -> str:
    """Replaces {0} and {1}; `str.format` would fail on other braces."""
    for place, value in enumerate(values):
        pattern = pattern.replace(f"{{{place}}}", value)
    return pattern


def _plural(strings: LocaleStrings, forms: dict[str, str], number: str) -> str:
    pattern = forms.get(strings.plural(Decimal(number)), forms["other"])
    # "A meter" is right for 1, but some languages use this form for 0 and 1.5 too.
    if "{0}" not in pattern and number not in ("1", "2"):
        raise KeyError
    return pattern


def format_number(number: str, strings: LocaleStrings) -> str:
    """Returns ASCII digits with the language's decimal and grouping signs (Indian languages group 12,34,567)."""
    whole, point, fraction = number.partition(".")
    first, others = strings.grouping
    groups = [whole[-first:]]
    rest = whole[:-first]
    while rest:
        groups.insert(0, rest[-others:])
        rest = rest[:-others]
    return strings.group.join(groups) + (strings.decimal + fraction if point else "")
