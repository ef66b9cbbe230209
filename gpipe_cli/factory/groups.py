"""Divides a model's parameters into groups by name and shape, each with settings of its own: `optimizer.groups`.

    optimizer.groups:
      - {match: "*.bias", weight_decay: 0}                     # a pattern, or a list of them, of full names
      - {only: vectors, weight_decay: 0}                       # or a shape: vectors, matrices, hidden
      - {match: ["embedding.*", "softmax.*"], lr_factor: 3}    # times optimizer.lr
      - {match: "encoder.*", frozen: true}

All entries that select a parameter apply; a later one's values replace an earlier one's. Other keys are arguments of
the optimizer. An optimizer with the attribute `FIRST_GROUPS` has these entries before the user's. A tied parameter has
its owner's name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from hydra.utils import get_object
from torch import nn

from ..config import GROUP
from ..errors import ConfigurationError
from ..layers import LayerBuilder, own_name
from ..partition.fake_layers import TensorShape
from ..partition.survey import Survey, survey
from ..typed_section import shown, typed

Shaped = TypeVar("Shaped", nn.Parameter, TensorShape)
GroupKey = tuple[int, ...]  # numbers of the entries that apply to a parameter; empty: only what `optimizer` says
WIDEST = 16  # times the shorter side of a hidden matrix: tables and classifiers are wider
NOT_HIDDEN = re.compile(
    r"(?:^|[._])(?:emb|embed|embeddings?|wte|wpe|tokens?|positions?|pos|table|head|softmax|logits|classifier|score|bias)"
    r"(?:$|[._])|^(?:fc|shared|output|decoder)\.weight$"
)


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Returns whether a parameter is a matrix between hidden features, by its name in the model and its shape."""
    return len(shape) == 2 and 1 < max(shape) <= WIDEST * min(shape) and not NOT_HIDDEN.search(name)


class Groups:
    """Decides which entries of `optimizer.groups` apply to a parameter, and the values that they set.

    Args:
        section: `optimizer`.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = section
        try:
            first = getattr(get_object(section["_target_"]), "FIRST_GROUPS", ())
        except Exception:  # `build_optimizer` will report it
            first = ()
        self._first = len(first)
        self.entries: list[Mapping[str, Any]] = [*first, *(section.get("groups") or ())]

    def key(self, name: str, shape: Sequence[int]) -> GroupKey:
        """Returns the numbers of the entries that select a parameter, by its name in the model and its shape."""
        return tuple(n for n, entry in enumerate(self.entries) if _selects(entry, name, shape))

    def divided(self, named: Iterable[tuple[str, Shaped]]) -> dict[GroupKey, list[Shaped]]:
        """Divides parameters, or their shapes, given with names in the model, by the entries that apply to them."""
        members: dict[GroupKey, list[Shaped]] = {}
        for name, parameter in named:
            members.setdefault(self.key(name, parameter.shape), []).append(parameter)
        return members

    def settings(self, key: GroupKey) -> dict[str, Any]:
        """Returns the optimizer's arguments for the parameters of a key that differ from those of `optimizer`."""
        found = self._merged(key)
        factor = found.pop("lr_factor", None)
        options = {name: value for name, value in found.items() if name not in GROUP.keys() - {"muon"}}
        if factor is not None:
            if (rate := options.get("lr", self._section.get("lr"))) is None:
                raise ConfigurationError("optimizer.groups has lr_factor: give optimizer.lr, which it multiplies")
            options["lr"] = rate * factor
        return options

    def freezes(self, key: GroupKey) -> bool:
        """Returns whether the parameters of a key do not learn."""
        return bool(self._merged(key).get("frozen"))

    def frozen_in(self, builders: Sequence[LayerBuilder]) -> list[LayerBuilder]:
        """Returns the layers with the parameters that an entry freezes in `LayerBuilder.frozen`."""
        if not any(entry.get("frozen") for entry in self.entries):
            return list(builders)
        frozen, made = set[str](), []
        for builder, parameters in zip(builders, survey(builders).parameters, strict=True):
            names = []
            for one in parameters:
                key = self.key(own_name(builder.name, one.name), one.form.shape)
                if str(one.owner) in frozen if one.owner else self.freezes(key):
                    names.append(one.name)
                    frozen.add(f"{builder.name}.{one.name}")
            made.append(replace(builder, frozen=(*builder.frozen, *names)))
        return made

    def told(self, builders: Sequence[LayerBuilder]) -> str:
        """Returns a line that lists the groups of a model, and how many parameters and weights each has.

        Raises:
            ConfigurationError: an entry, or one of its patterns, selects no parameter.
        """
        layers: Survey[Any] = survey(builders)
        named = [
            (own_name(layer, one.name), one)
            for layer, parameters in zip(layers.names, layers.parameters, strict=True)
            for one in parameters
        ]
        found = {name: one.form for name, one in named if one.owner is None}
        tied = [(name, own_name(*one.owner)) for name, one in named if one.owner is not None]
        for number, entry in enumerate(self.entries[self._first :]):
            for pattern in _patterns(entry):
                alone = {**entry, "match": pattern}
                if any(_selects(alone, name, form.shape) for name, form in found.items()):
                    continue
                if any(fnmatchcase(name, pattern) and _selects(entry, o, found[o].shape) for name, o in tied):
                    continue  # another pattern of the entry selects it
                names = ", ".join([*found][:: max(1, len(found) // 4)][:4])
                said = f"optimizer.groups[{number}]={shown(alone)} selects no parameter. The names are as {names}"
                raise ConfigurationError(f"{said}; a tied parameter has its owner's")
        groups = []
        for key, forms in sorted(self.divided(found.items()).items()):
            settings = typed(self._merged(key)) if key else "as `optimizer` says"
            weights = sum(form.numel for form in forms)
            groups.append(f"{len(forms)} parameters ({weights:,} weights) {settings}")
        return f"optimizer.groups: {'; '.join(groups)}"

    def _merged(self, key: GroupKey) -> dict[str, Any]:
        """Returns the values that the entries of a key set; a later entry's replace an earlier one's."""
        found: dict[str, Any] = {}
        for number in key:
            found |= {name: value for name, value in self.entries[number].items() if name not in ("match", "only")}
        return found


def _selects(entry: Mapping[str, Any], name: str, shape: Sequence[int]) -> bool:
    """Returns whether an entry's `match` and `only` select a parameter, by its name in the model and its shape."""
    only = entry.get("only")
    if not any(fnmatchcase(name, pattern) for pattern in _patterns(entry)):
        return False
    if only == "hidden":
        return is_hidden(name, shape)
    return only is None or (len(shape) > 1) == (only == "matrices")


def _patterns(entry: Mapping[str, Any]) -> Sequence[str]:
    patterns: str | Sequence[str] = entry.get("match", "*")
    return [patterns] if isinstance(patterns, str) else patterns
