"""Reads one language's own strings from Babel's copy of CLDR; the only file that uses Babel's private data.

If a language lacks a string, Babel's formatters fall back silently: a currency becomes its code, "3 days ago" becomes
"-3 d", "or" becomes English. Such pairs would teach copying, so nothing is formatted with Babel. The strings are read
from `Locale._data` and compared with CLDR's root; those that are not the language's own are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        patterns: of dates, "full" and "long"; "time", "zone time" (printf style) and "date and time" ("{1}, {0}").
        amount: plural patterns of number and currency, "{0} {1}".
        compact: by plural form and magnitude, "00 million".
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
    root: dict[Any, Any] = _plain(localedata.LocaleDataDict(tables))
    return root


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
    """Returns the plural patterns that are complete (have "other") and are not root's; "per" is no plural form."""
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
