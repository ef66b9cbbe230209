"""Reads one language's own strings from Babel's copy of CLDR, and renders items with them as text.

It is the only file that uses Babel's private data.
If a language lacks a string, Babel's formatters fall back silently: a currency becomes its code, "3 days ago" becomes
"-3 d", "or" becomes English. Such pairs would teach copying, so nothing is formatted with Babel. The strings are read
from `Locale._data` and compared with CLDR's root; those that are not the language's own are left out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

import babel
from babel import Locale, localedata

NAME_KINDS = ("territory", "language", "script", "currency", "zone")
RELATIVE_FIELDS = ("year", "month", "week", "day", "hour", "minute", "second")

Name = tuple[str, str]
"""(kind, CLDR key), for instance ("territory", "DE"): a name in no particular language."""

Forms = dict[str, str]
"""A pattern for each plural form ("one", "few", "other", …)."""

_NO_NAMES = {"XA", "XB", "ZZ", "und", "zxx", "mul", "Zxxx", "Zyyy", "Zzzz"}
_CLEAN = str.maketrans(
    {"\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200e": None, "\u200f": None, "\u061c": None}
)  # no-break, narrow and thin spaces; left-to-right, right-to-left and Arabic letter marks


@dataclass(frozen=True)
class LocaleStrings:
    """Holds the strings of one language, only those that are its own in CLDR.

    Attributes:
        names: territory, language, script, currency and zone names.
        currencies: plural forms of each currency's name.
        units: plural patterns of each unit, "{0} meters".
        relative: plural patterns of (field, "past" or "future"), "{0} days ago".
        lists: the patterns "2", "start", "middle", "end" of the styles "standard" and "or".
        fields: months, weekdays, day periods and eras by DateTimePattern field ("MMMM", "cccc", "a", "G").
        patterns: "full" and "long" dates; "time", "zone time" (printf style) and "date and time" ("{1}, {0}").
        amount: plural patterns of number and currency, "{0} {1}".
        compact: patterns by plural form and magnitude, "00 million".
        decimal, group, grouping: signs of a number, and the digits of its last group and of its other groups.
        plural: returns the plural form of a number.
    """

    code: str
    names: dict[Name, str]
    currencies: dict[str, Forms]
    units: dict[str, Forms]
    relative: dict[tuple[str, str], Forms]
    lists: dict[str, Forms]
    fields: dict[str, dict[Any, str]]
    patterns: dict[str, str]
    amount: Forms
    compact: dict[str, dict[str, str]]
    decimal: str
    group: str
    grouping: tuple[int, int]
    plural: Callable[[Any], str]


def cldr_version() -> str:
    """Returns CLDR's version, or Babel's if Babel does not give it (before 2.18). The corpus depends on it."""
    version = getattr(babel.core, "get_cldr_version", None)
    return f"cldr{version()}" if version else f"babel{babel.__version__}"


@cache
def locale_strings(code: str) -> LocaleStrings:
    """Returns the strings of the language `code` (0.01 s; cached, because every language is needed more than once)."""
    locale = Locale(code)
    data = _plain(locale._data)
    root = _root()
    symbols = data["number_symbols"]["latn"]
    return LocaleStrings(
        code=code,
        names=_names(data),
        currencies=_forms(data["currency_names_plural"], {}),
        units=_forms({k: v.get("long", {}) for k, v in data["unit_patterns"].items()}, root["unit_patterns"]),
        relative=_relative(data["date_fields"], root["date_fields"]),
        lists=_lists(data["list_patterns"], root["list_patterns"], is_english=code == "en"),
        fields=_fields(data, root, is_english=code == "en"),
        patterns=_patterns(data),
        amount={form: clean(pattern) for form, pattern in data["currency_unit_patterns"].items()},
        compact={
            form: {magnitude: clean(_unquote(pattern.pattern)) for magnitude, pattern in by_magnitude.items()}
            for form, by_magnitude in data["compact_decimal_formats"].get("long", {}).items()
        },
        decimal=symbols["decimal"].translate(_CLEAN),
        group=symbols["group"].translate(_CLEAN),
        grouping=tuple(data["decimal_formats"][None].grouping),
        plural=locale.plural_form,
    )


def clean(text: str) -> str:
    """Returns the text with ordinary spaces, no direction marks, and no space at either end."""
    return text.translate(_CLEAN).strip()


@cache
def _root() -> dict[Any, Any]:
    tables: Any = localedata.load("root")
    return dict(_plain(localedata.LocaleDataDict(tables)))


def _plain(value: Any) -> Any:
    """Returns nested ordinary dicts with Babel's aliases resolved."""
    return {key: _plain(value[key]) for key in value} if isinstance(value, Mapping) else value


def _names(data: dict[str, Any]) -> dict[Name, str]:
    tables: dict[str, dict[str, Any]] = {
        "territory": data["territories"],
        "language": data["languages"],
        "script": data["scripts"],
        "currency": data["currency_names"],
        "zone": {f"{zone}/{kind}": text for zone, forms in data["meta_zones"].items()
                 for kind, text in forms.get("long", {}).items()},
    }  # fmt: skip
    return {
        (kind, key): clean(text)
        for kind in NAME_KINDS
        for key, text in sorted(tables[kind].items())
        if isinstance(text, str) and key not in _NO_NAMES and clean(text) not in ("", key)
    }


def _forms(table: dict[str, dict[str, str]], root: dict[str, Any]) -> dict[str, Forms]:
    """Returns the plural patterns that have the form "other" and are not root's. "per" is no plural form."""
    found = {}
    for key, patterns in sorted(table.items()):
        forms = {form: clean(pattern) for form, pattern in patterns.items() if form != "per" and pattern}
        if "other" in forms and patterns != root.get(key, {}).get("long"):
            found[key] = forms
    return found


def _relative(fields: dict[str, Any], root: dict[str, Any]) -> dict[tuple[str, str], Forms]:
    return {
        (field, direction): {form: clean(pattern) for form, pattern in fields[field][direction].items()}
        for field in RELATIVE_FIELDS
        for direction in ("past", "future")
        if "other" in fields[field].get(direction, {})
        and fields[field][direction]["other"] != root[field][direction]["other"]
    }


def _lists(lists: dict[str, Any], root: dict[str, Any], is_english: bool) -> dict[str, Forms]:
    # Languages without a word for "or" inherit root's English "or"; root's comma is no word of any language.
    return {
        style: {place: pattern.translate(_CLEAN) for place, pattern in lists[style].items()}
        for style in ("standard", "or")
        if style in lists and (style == "standard" or is_english or lists[style]["end"] != root[style]["end"])
    }


def _fields(data: dict[str, Any], root: dict[str, Any], is_english: bool) -> dict[str, dict[Any, str]]:
    """Returns the words of date and time patterns by field letter."""
    places = (
        ("MMMM", "months", "format", "wide"),
        ("LLLL", "months", "stand-alone", "wide"),
        ("EEEE", "days", "format", "wide"),
        ("cccc", "days", "stand-alone", "wide"),
        ("a", "day_periods", "format", "wide"),
        ("a", "day_periods", "format", "abbreviated"),  # the later one wins; Korean has its own words only for "wide"
    )
    found: dict[str, dict[Any, str]] = {}
    for field, table, context, width in places:
        words, fallback = data[table][context][width], root[table][context]
        keys = ("am", "pm") if field == "a" else tuple(sorted(words))
        others = {key: {of.get(key) for of in fallback.values()} for key in keys}
        if all(key in words and (is_english or words[key] not in others[key]) for key in keys):
            found[field] = {key: clean(words[key]) for key in keys}
    if data["eras"]["abbreviated"] != root["eras"]["abbreviated"]:
        found["G"] = {era: clean(text) for era, text in data["eras"]["abbreviated"].items()}
    return found


def _patterns(data: dict[str, Any]) -> dict[str, str]:
    return {
        "full": clean(data["date_formats"]["full"].format),
        "long": clean(data["date_formats"]["long"].format),
        "time": clean(data["time_formats"]["short"].format),
        "zone time": clean(data["time_formats"]["full"].format),
        "date and time": clean(_unquote(data["datetime_formats"]["full"])),
    }


def _unquote(pattern: str) -> str:
    """Removes the quotes around letters that are not fields, as in "0 Mio'.'"."""
    return pattern.replace("'", "")


# -- rendering ---------------------------------------------------------------------------------------------------------


Item = tuple[Any, ...]
"""A language-free content: ("list", "or", (item, item)), ("unit", "3.5", "length-meter"), ("date", "full", day) …

Numbers are decimal strings, days are `date.toordinal()`, times are seconds after midnight."""


def render(item: Item, strings: LocaleStrings) -> str | None:
    """Returns an item's text, or None if the language has no string of its own for it."""
    try:
        return _RENDER[item[0]](strings, *item[1:])
    except KeyError:
        return None


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


def _counted(strings: LocaleStrings, forms: Forms, number: str) -> str:
    """Returns a number in the pattern for its plural form; KeyError if that pattern does not show the number."""
    pattern = forms.get(strings.plural(Decimal(number)), forms["other"])
    # "A meter" is right for 1, but some languages use this form for 0 and 1.5 too.
    if "{0}" not in pattern and number not in ("1", "2"):
        raise KeyError
    return _fill(pattern, format_number(number, strings))


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


_RENDER: dict[str, Callable[..., str]] = {
    "name": lambda of, kind, key: of.names[kind, key],
    "list": _list,
    "money": _money,
    "unit": lambda of, number, unit: _counted(of, of.units[unit], number),
    "relative": lambda of, number, *key: _counted(of, of.relative[key], number),
    "compact": _compact,
    "language in territory": lambda of, name, place: f"{of.names['language', name]} ({of.names['territory', place]})",
    "date": _date,
    "date and time": _date_time,
    "zone time": lambda of, time, zone: (
        of.patterns["zone time"] % _Fields(of, seconds=time, zone=of.names["zone", zone])
    ),
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
