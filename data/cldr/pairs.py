"""Makes the CLDR corpus' pairs of a sentence and its English, and keeps held-out contents out of the training text.

The strings are translated by people; the sentences are composed by each language's own patterns. A model learns from
them compositional translation over a known lexicon, not open-vocabulary prose. docs/data.md shows samples.

An item is the language-free content of a sentence; it is drawn from what a language can express.
"""

import bisect
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from .languages import LANGUAGES
from .strings import NAME_KINDS, Item, LocaleStrings, locale_strings, render

# How often each kind of item is drawn. Half are lists: they teach the lexicon and how a language joins and reorders,
# and are far from being exhausted. Dates are few: they are grammar and copying, which is learnt first.
TRAIN_MIX = {
    "list": 50, "money": 8, "unit": 8, "date": 6, "date and time": 6, "language in territory": 6, "zone time": 5,
    "relative": 4, "compact": 3, "name": 3, "zone name": 1,
}  # fmt: skip
# No name is held out, because it cannot be guessed; "5 million" is too short for the 4-grams of BLEU.
HELD_OUT_MIX = {kind: weight for kind, weight in TRAIN_MIX.items() if kind not in ("compact", "name", "zone name")}
HELD_OUT_ITEMS = 300
HELD_OUT_SHARE = {"dev": range(10), "test": range(10, 20)}  # of 1000
CORE_SHARE = 0.9  # held-out items use strings that nine languages in ten have
FIRST_DAY, LAST_DAY = 693596, 766644  # 1900-01-01 … 2099-12-31, as date.toordinal() counts

_Choice = TypeVar("_Choice")

Inventory = dict[str, list[Any]]
"""What items can be made of: kind -> sorted CLDR keys; those of "relative" are (field, direction)."""


@cache
def unambiguous_inventory(code: str) -> Inventory:
    """Returns the names, units and relative times of a language that have exactly one English meaning.

    Thai has one word for "Polish" and "Poland": nothing in a sentence shows which is meant, so both are left out.
    """
    english, strings = locale_strings("en"), locale_strings(code)
    meanings: dict[str, set[str]] = {}
    for text, meaning in _texts(strings, english):
        meanings.setdefault(text, set()).add(meaning)
    inventory: Inventory = {kind: [] for kind in NAME_KINDS}
    for (kind, key), text in strings.names.items():
        forms = {text, *strings.currencies.get(key, {}).values()} if kind == "currency" else {text}
        if (kind, key) in english.names and _one(meanings, forms):
            inventory[kind].append(key)
    known = {unit: forms for unit, forms in strings.units.items() if unit in english.units}
    for kind, table in (("unit", known), ("relative", strings.relative)):
        inventory[kind] = [key for key, forms in table.items() if _one(meanings, forms.values())]
    return inventory


def _one(meanings: dict[str, set[str]], texts: Iterable[str]) -> bool:
    """Returns whether each text has exactly one meaning."""
    return all(len(meanings[text]) == 1 for text in texts)


@cache
def core_inventory() -> Inventory:
    """Returns the items that at least nine in ten of all 102 languages can express, to be held out."""
    counts = Counter(key for code in LANGUAGES for key in inventory_keys(unambiguous_inventory(code)))
    core = sorted(key for key, count in counts.items() if count >= CORE_SHARE * len(LANGUAGES))
    return {kind: [key for its_kind, key in core if its_kind == kind] for kind in (*NAME_KINDS, "unit", "relative")}


def inventory_keys(inventory: Inventory) -> set[tuple[str, Any]]:
    """Returns the keys of an inventory as (kind, key)."""
    return {(kind, key) for kind, keys in inventory.items() for key in keys}


def used_keys(item: Item) -> list[tuple[str, Any]]:
    """Returns the keys, as `inventory_keys` has them, that an item is made of."""
    kind = item[0]
    if kind == "list":
        return [key for inner in item[2] for key in used_keys(inner)]
    if kind == "language in territory":
        return [("language", item[1]), ("territory", item[2])]
    of_kind = {
        "name": item[1:],
        "money": ("currency", item[-1]),
        "unit": ("unit", item[-1]),
        "zone time": ("zone", item[-1]),
        "relative": ("relative", item[2:]),
    }
    return [of_kind[kind]] if kind in of_kind else []


def _texts(strings: LocaleStrings, english: LocaleStrings) -> Iterator[tuple[str, str]]:
    """Yields (text, English meaning) of every name, plural form and relative time."""
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


class ItemDraw:
    """Draws items from an inventory, kinds by the weights of `mix`.

    It uses `Random.random()` alone, whose sequence Python never changes.
    """

    def __init__(self, inventory: Inventory, mix: dict[str, int], key: str) -> None:
        self._inventory, self._mix = inventory, mix
        self._random = random.Random(key).random
        self._makers: dict[str, Callable[[], Item]] = {
            "list": self._list,
            "money": self._money,
            "unit": self._unit,
            "date": lambda: ("date", *self._day()),
            "date and time": lambda: ("date and time", *self._day(), 60 * self._below(1440)),
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
            items = [self._name() for _ in range(self._weighted({2: 40, 3: 35, 4: 25}))]
        else:
            items = [(self._money if self._random() < 0.5 else self._unit)() for _ in range(2 + self._below(2))]
        return ("list", style, tuple(dict.fromkeys(items))) if len(set(items)) > 1 else self._list()

    def _name(self) -> Item:
        kind = self._weighted({"territory": 38, "language": 38, "currency": 16, "script": 8})
        return ("name", kind, self._key(kind))

    def _money(self) -> Item:
        return ("money", self._number(), self._key("currency"))

    def _unit(self) -> Item:
        return ("unit", self._number(), self._key("unit"))

    def _relative(self) -> Item:
        if not self._inventory["relative"]:
            return self.item()
        return ("relative", str(1 + self._below(120)), *self._key("relative"))

    def _number(self) -> str:
        """Returns a number up to 100, up to ten million, or with one or two decimals (the last one not 0)."""
        form = self._weighted({"small": 50, "large": 25, "decimal": 25})
        if form == "small":
            return str(1 + self._below(100))
        if form == "large":
            return str(int(10 ** (2 + 5 * self._random())))
        tenths = str(self._below(10)) if self._random() < 0.3 else ""
        return f"{self._below(1000)}.{tenths}{1 + self._below(9)}"

    def _day(self) -> tuple[str, int]:
        """Returns a style and a day."""
        return self._weighted({"full": 1, "long": 1}), FIRST_DAY + self._below(LAST_DAY - FIRST_DAY + 1)

    def _key(self, kind: str) -> Any:
        keys = self._inventory[kind]
        return keys[self._below(len(keys))]

    def _below(self, count: int) -> int:
        """Draws one of 0 … count − 1."""
        return int(self._random() * count)

    def _weighted(self, weights: dict[_Choice, int]) -> _Choice:
        """Draws a key with probability in proportion to its weight."""
        totals = list(accumulate(weights.values()))
        return list(weights)[bisect.bisect(totals, self._random() * totals[-1])]


# -- pairs -------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Holds a sentence and its English."""

    source: str
    target: str


def train_pairs(code: str, count: int, seed: int) -> list[Pair]:
    """Returns `count` different pairs, or all if there are fewer. The first n are the same for any count ≥ n."""
    english, strings = locale_strings("en"), locale_strings(code)
    draw = ItemDraw(unambiguous_inventory(code), TRAIN_MIX, f"train {code} {seed}")
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


def held_out_pairs(code: str, split: str, seed: int) -> list[Pair]:
    """Returns the pairs of the 300 items of "dev" or "test", which are the same for every language.

    Items that the language cannot express, or that equal their English, are left out.
    """
    english, strings = locale_strings("en"), locale_strings(code)
    known = inventory_keys(unambiguous_inventory(code))
    found: dict[str, Pair] = {}
    for item in held_out_items(split, seed):
        target, source = render(item, english), render(item, strings)
        if target is None or source is None or source == target or not known.issuperset(used_keys(item)):
            continue
        found.setdefault(source, Pair(source, target))
    return list(found.values())


@cache
def held_out_items(split: str, seed: int) -> tuple[Item, ...]:
    """Returns the 300 different items of "dev" or "test"."""
    draw = ItemDraw(core_inventory(), HELD_OUT_MIX, f"held out {split} {seed}")
    found: dict[str, Item] = {}
    while len(found) < HELD_OUT_ITEMS:
        item = draw.item()
        if split_of(content_key(item)) == split:
            found.setdefault(content_key(item), item)
    return tuple(found.values())


def held_out(item: Item) -> str:
    """Returns "dev" or "test" if the item, or one in its list, belongs to that split, else "train"."""
    splits = [split_of(content_key(inner)) for inner in (item[2] if item[0] == "list" else ())]
    return next((split for split in [split_of(content_key(item)), *splits] if split != "train"), "train")


def split_of(key: str) -> str:
    """Returns the split of a content key by its hash, so that it depends on no order, language or corpus size."""
    if key.startswith("name "):
        return "train"
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 1000
    return next((split for split, share in HELD_OUT_SHARE.items() if place in share), "train")


def content_key(item: Item) -> str:
    """Returns a key of an item's content: its English text, without style and order.

    "A, B or C" and "C, A and B" have one key, and so have the long and the full form of a day, with or without a time.
    """
    kind = item[0]
    if kind in ("date", "date and time"):
        return f"day {item[2]}"
    if kind == "list":
        return "list " + " | ".join(sorted(content_key(inner) for inner in item[2]))
    return f"{kind} {render(item, locale_strings('en'))}"
