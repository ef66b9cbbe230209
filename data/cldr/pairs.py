"""A corpus of translations into English from CLDR: 102 languages, very uneven sizes, nothing to download.

The strings are translated by people, the sentences are composed by each language's own patterns: what a model learns
from them is compositional translation over a known lexicon, not open-vocabulary prose. docs/data.md shows samples.
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

from .languages import LANGUAGES, RANK
from .rendering import Item, render
from .strings import NAME_KINDS, RELATIVE_FIELDS, LocaleStrings, locale_strings

# How often each kind of item is drawn. Lists are half: they teach the lexicon and how a language joins and reorders,
# and stay far from saturation. Dates are grammar and copying, learnt first, so they are few.
TRAIN_MIX = {
    "list": 50, "money": 8, "unit": 8, "date": 6, "date and time": 6, "language in territory": 6, "zone time": 5,
    "relative": 4, "compact": 3, "name": 3, "zone name": 1,
}  # fmt: skip
# A name cannot be guessed, so none is held out; "5 million" is too short for the 4-grams of BLEU.
HELD_OUT_MIX = {kind: weight for kind, weight in TRAIN_MIX.items() if kind not in ("compact", "name", "zone name")}
HELD_OUT_ITEMS = 300
HELD_OUT_SHARE = {"dev": range(10), "test": range(10, 20)}  # of 1000
CORE_SHARE = 0.9  # held-out items use strings that nine languages in ten have

FIRST_DAY, LAST_DAY = 693596, 766644  # 1900-01-01 … 2099-12-31, as date.toordinal() counts

_Choice = TypeVar("_Choice")


class Pair(NamedTuple):
    """A sentence and its English."""

    source: str
    target: str


class Inventory(NamedTuple):
    """What items can be made of: CLDR keys, sorted, by kind."""

    names: dict[str, list[str]]
    units: list[str]
    relative: list[tuple[str, str]]


def check_languages(codes: Sequence[str] | None) -> list[str]:
    """The chosen codes in the table's order, all 102 for None.

    Raises:
        ValueError: a code that is not in the table, with the nearest ones.
    """
    if codes is None:
        return [language.code for language in LANGUAGES]
    for code in codes:
        if code not in RANK:
            raise ValueError(f"data.languages: no language '{code}' in the corpus{_nearest(code)}")
    if not codes:
        raise ValueError("data.languages is empty: give codes such as [de,fr], or null for all 102")
    return sorted(set(codes), key=RANK.__getitem__)


def _nearest(code: object) -> str:
    if code is False:
        return ": YAML reads the bare word no as false, so write Norwegian as 'no'"
    by_name = {language.name.lower(): language.code for language in LANGUAGES}
    words = difflib.get_close_matches(str(code).lower(), [*by_name, *RANK], n=4, cutoff=0.5)
    near = dict.fromkeys(by_name.get(word, word) for word in words)
    return f"; near: {', '.join(near)}" if near else "; docs/data.md lists all 102"


def corpus_size(code: str, largest: int, smallest: int) -> int:
    """Training pairs of a language: a straight line on a logarithmic scale over the table's ranks.

    The paper's sizes fall in the same way (section 5). A size does not depend on the languages chosen, so that a
    bilingual baseline trains on exactly the pairs of the multilingual run.
    """
    share: float = (smallest / largest) ** (RANK[code] / (len(LANGUAGES) - 1))
    return round(largest * share)


def train_pairs(code: str, count: int, seed: int) -> list[Pair]:
    """`count` different pairs; fewer only if the language has no more. The first n are the same for any count ≥ n."""
    english, strings = locale_strings("en"), locale_strings(code)
    draw = _Draw(unambiguous_inventory(code), TRAIN_MIX, f"train {code} {seed}")
    targets: dict[str, str] = {}
    for _ in range(20 * count + 10_000):
        if len(targets) == count:
            break
        item = draw.item()
        target, source = render(item, english), render(item, strings)
        if target is None or source is None or source == target or source in targets or held_out(item) != "train":
            continue
        targets[source] = target
    return [Pair(source, target) for source, target in targets.items()]


def held_out_pairs(code: str, split: str, seed: int) -> list[tuple[int, Pair]]:
    """(item number, pair) of each of the 300 items of "dev" or "test" that the language can say otherwise than English.

    The English items are the same for every language.
    """
    english, strings = locale_strings("en"), locale_strings(code)
    known = _keys(unambiguous_inventory(code))
    found: dict[str, tuple[int, Pair]] = {}
    for number, item in enumerate(held_out_items(split, seed)):
        target, source = render(item, english), render(item, strings)
        if target is None or source is None or source == target or not known.issuperset(_used(item)):
            continue
        found.setdefault(source, (number, Pair(source, target)))
    return list(found.values())


@cache
def held_out_items(split: str, seed: int) -> tuple[Item, ...]:
    """The 300 different items of "dev" or "test"."""
    draw = _Draw(core_inventory(), HELD_OUT_MIX, f"held out {split} {seed}")
    found: dict[str, Item] = {}
    while len(found) < HELD_OUT_ITEMS:
        item = draw.item()
        if split_of(content_key(item)) == split:
            found.setdefault(content_key(item), item)
    return tuple(found.values())


def held_out(item: Item) -> str:
    """The split that the item or one of its parts is kept for, or "train"."""
    splits = [split_of(content_key(part)) for part in (item[2] if item[0] == "list" else ())]
    return next((split for split in [split_of(content_key(item)), *splits] if split != "train"), "train")


def split_of(key: str) -> str:
    """The split of a content key: blake2b mod 1000, so it depends on no order, language or corpus size."""
    if key.startswith("name "):
        return "train"
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 1000
    return next((split for split, share in HELD_OUT_SHARE.items() if place in share), "train")


def content_key(item: Item) -> str:
    """What the English side says, without style and order.

    "A, B or C" and "C, A and B" have one key, and so have the long and the full form of a day, with or without a time.
    """
    kind = item[0]
    if kind in ("date", "date and time"):
        return f"day {item[2]}"
    if kind == "list":
        return "list " + " | ".join(sorted(content_key(part) for part in item[2]))
    return f"{kind} {render(item, locale_strings('en'))}"


@cache
def unambiguous_inventory(code: str) -> Inventory:
    """The names, units and relative times that are a language's own, have an English, and mean one English thing only.

    Thai has one word for "Polish" and "Poland": no source tag tells which, so both are left out.
    """
    english, strings = locale_strings("en"), locale_strings(code)
    meanings: dict[str, set[str]] = {}
    for text, meaning in _texts(strings, english):
        meanings.setdefault(text, set()).add(meaning)
    names: dict[str, list[str]] = {kind: [] for kind in NAME_KINDS}
    for (kind, key), text in strings.names.items():
        forms = {text, *strings.currencies.get(key, {}).values()} if kind == "currency" else {text}
        if (kind, key) in english.names and _one(meanings, forms):
            names[kind].append(key)
    units = [unit for unit, forms in strings.units.items() if unit in english.units and _one(meanings, forms.values())]
    relative = [field for field, forms in strings.relative.items() if _one(meanings, forms.values())]
    return Inventory(names, units, relative)


def _one(meanings: dict[str, set[str]], texts: Iterable[str]) -> bool:
    return all(len(meanings[text]) == 1 for text in texts)


@cache
def core_inventory() -> Inventory:
    """What at least nine in ten of all 102 languages can say: the material of the held-out items."""
    counts = Counter(key for language in LANGUAGES for key in _keys(unambiguous_inventory(language.code)))
    core = sorted(key for key, count in counts.items() if count >= CORE_SHARE * len(LANGUAGES))
    names = {kind: [key for of, key in core if of == kind] for kind in NAME_KINDS}
    relative = [(field, direction) for field, direction in core if field in RELATIVE_FIELDS]
    return Inventory(names, [key for kind, key in core if kind == "unit"], relative)


def _keys(inventory: Inventory) -> set[tuple[str, str]]:
    """All of an inventory, as (kind, key); relative times are (field, direction) already."""
    names = {(kind, key) for kind, keys in inventory.names.items() for key in keys}
    return names | {("unit", unit) for unit in inventory.units} | set(inventory.relative)


def _used(item: Item) -> list[tuple[str, str]]:
    """The keys (as of `_keys`) that an item is made of."""
    kind = item[0]
    if kind == "list":
        return [key for part in item[2] for key in _used(part)]
    if kind == "language in territory":
        return [("language", item[1]), ("territory", item[2])]
    of_kind = {
        "name": item[1:],
        "money": ("currency", item[-1]),
        "unit": ("unit", item[-1]),
        "zone time": ("zone", item[-1]),
        "relative": item[2:],
    }
    return [of_kind[kind]] if kind in of_kind else []


def _texts(strings: LocaleStrings, english: LocaleStrings) -> Iterator[tuple[str, str]]:
    """(text, English meaning) of every name, plural form and relative time."""
    for name, text in strings.names.items():
        if name in english.names:
            yield text, english.names[name]
            if name[0] == "currency":
                for form in strings.currencies.get(name[1], {}).values():
                    yield form, english.names[name]
    for unit in strings.units.keys() & english.units.keys():
        for form in strings.units[unit].values():
            yield form, english.units[unit]["other"]
    for field, forms in strings.relative.items():
        for form in forms.values():
            yield form, english.relative[field]["other"]


class _Draw:
    """Draws items by a mix. Only `Random.random()` is used: its sequence is the one that Python never changes."""

    def __init__(self, inventory: Inventory, mix: dict[str, int], key: str) -> None:
        self._inventory, self._mix = inventory, mix
        self._random = random.Random(key).random
        self._makers: dict[str, Callable[[], Item]] = {
            "list": self._list,
            "money": self._money,
            "unit": self._unit,
            "date": lambda: ("date", self._date_style(), self._day()),
            "date and time": lambda: ("date and time", self._date_style(), self._day(), 60 * self._below(1440)),
            "language in territory": lambda: ("language in territory", self._key("language"), self._key("territory")),
            "zone time": lambda: ("zone time", self._below(86400), self._key("zone")),
            "relative": self._relative,
            "compact": lambda: ("compact", str(1 + self._below(99)) + "0" * (2 + self._below(11))),
            "name": self._name,
            "zone name": lambda: ("name", "zone", self._key("zone")),
        }

    def item(self) -> Item:
        return self._makers[self._weighted(self._mix)]()

    def _list(self) -> Item:
        style = self._weighted({"standard": 60, "or": 40})
        if self._random() < 0.75:
            parts = [self._name() for _ in range(self._weighted({2: 40, 3: 35, 4: 25}))]
        else:
            parts = [(self._money if self._random() < 0.5 else self._unit)() for _ in range(2 + self._below(2))]
        return ("list", style, tuple(dict.fromkeys(parts))) if len(set(parts)) > 1 else self._list()

    def _name(self) -> Item:
        kind = self._weighted({"territory": 38, "language": 38, "currency": 16, "script": 8})
        return ("name", kind, self._key(kind))

    def _money(self) -> Item:
        return ("money", self._number(), self._key("currency"))

    def _unit(self) -> Item:
        return ("unit", self._number(), self._inventory.units[self._below(len(self._inventory.units))])

    def _relative(self) -> Item:
        known = self._inventory.relative
        return ("relative", str(1 + self._below(120)), *known[self._below(len(known))]) if known else self.item()

    def _number(self) -> str:
        """Up to 100, up to ten million, or with a digit or two after the point (the last one never 0)."""
        form = self._weighted({"small": 50, "large": 25, "decimal": 25})
        if form == "small":
            return str(1 + self._below(100))
        if form == "large":
            return str(int(10 ** (2 + 5 * self._random())))
        tenths = str(self._below(10)) if self._random() < 0.3 else ""
        return f"{self._below(1000)}.{tenths}{1 + self._below(9)}"

    def _date_style(self) -> str:
        return self._weighted({"full": 1, "long": 1})

    def _day(self) -> int:
        return FIRST_DAY + self._below(LAST_DAY - FIRST_DAY + 1)

    def _key(self, kind: str) -> str:
        keys = self._inventory.names[kind]
        return keys[self._below(len(keys))]

    def _below(self, count: int) -> int:
        return int(self._random() * count)

    def _weighted(self, weights: dict[_Choice, int]) -> _Choice:
        totals = list(accumulate(weights.values()))
        return list(weights)[bisect.bisect(totals, self._random() * totals[-1])]
