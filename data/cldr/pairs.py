"""Makes the CLDR corpus' pairs of a sentence and its English, and keeps held-out contents out of the training text.

The strings are translated by people; the sentences are composed by each language's own patterns. A model learns from
them compositional translation over a known lexicon, not open-vocabulary prose. docs/data.md shows samples.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

from .items import ItemDraw, core_inventory, inventory_keys, unambiguous_inventory, used_keys
from .rendering import Item, render
from .strings import locale_strings

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


def held_out_pairs(code: str, split: str, seed: int) -> list[tuple[int, Pair]]:
    """Returns (item number, pair) of the 300 items of "dev" or "test", the same for every language.

    Items that the language cannot express, or that equal their English, are left out.
    """
    english, strings = locale_strings("en"), locale_strings(code)
    known = inventory_keys(unambiguous_inventory(code))
    found: dict[str, tuple[int, Pair]] = {}
    for number, item in enumerate(held_out_items(split, seed)):
        target, source = render(item, english), render(item, strings)
        if target is None or source is None or source == target or not known.issuperset(used_keys(item)):
            continue
        found.setdefault(source, (number, Pair(source, target)))
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
    """Returns the split of which the item, or an item in its list, is part: "dev", "test" or "train"."""
    splits = [split_of(content_key(inner)) for inner in (item[2] if item[0] == "list" else ())]
    return next((split for split in [split_of(content_key(item)), *splits] if split != "train"), "train")


def split_of(key: str) -> str:
    """Returns the split of a content key by its hash, so that it depends on no order, language or corpus size."""
    if key.startswith("name "):
        return "train"
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 1000
    return next((split for split, share in HELD_OUT_SHARE.items() if place in share), "train")


def content_key(item: Item) -> str:
    """Returns the content of the English side, without style and order.

    "A, B or C" and "C, A and B" have one key, and so have the long and the full form of a day, with or without a time.
    """
    kind = item[0]
    if kind in ("date", "date and time"):
        return f"day {item[2]}"
    if kind == "list":
        return "list " + " | ".join(sorted(content_key(inner) for inner in item[2]))
    return f"{kind} {render(item, locale_strings('en'))}"
