"""Names the layers of a traced module after the calls in them, and says which layer holds which parameter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import fx

from ...layers import AGAIN, SPAN
from .positions import calls_of
from .trace import Trace

Part = tuple[Sequence[fx.Node], Sequence[fx.Node]]  # nodes of the training graph and of that for evaluation


class Names:
    """Finds all names.

    Attributes:
        layers: name of each layer.
        held: for each layer: name within the layer -> first name in the module.
        local: for each layer: first name in the module -> the name within the layer by which its code uses it.
        tied: for each layer: name within the layer -> ``<layer>.<name>`` in the first layer that holds it.
    """

    def __init__(self, trace: Trace, parts: Sequence[Part]) -> None:
        self._trace = trace
        self._uses = [self._used(part) for part in parts]
        whole = self._assigned(parts)
        self.layers = _layer_names(parts, whole)
        prefixes = ["" if SPAN in name else f"{name}." for name in self.layers]
        self.held = [
            {name.removeprefix(prefix): first for name, first in names.items()}
            for prefix, names in zip(prefixes, whole, strict=True)
        ]
        self.local: list[dict[str, str]] = []
        self.tied: list[dict[str, str]] = []
        owner: dict[str, tuple[str, str]] = {}
        for layer, names in zip(self.layers, self.held, strict=True):
            local: dict[str, str] = {}
            tied: dict[str, str] = {}
            for name, first in names.items():
                local.setdefault(first, name)
                form = trace.forms.get(first)
                if form is None or not form.parameter:
                    continue
                held_by, its_name = owner.setdefault(first, (layer, name))
                if held_by != layer:
                    tied[name] = f"{held_by}.{its_name}"
            self.local.append(local)
            self.tied.append(tied)

    def _used(self, part: Part) -> set[str]:
        flats = (self._trace.training, self._trace.evaluation)
        return {
            flat.held[argument]
            for flat, nodes in zip(flats, part, strict=True)
            for node in nodes
            for argument in node.all_input_nodes
            if argument in flat.held
        }

    def _assigned(self, parts: Sequence[Part]) -> list[dict[str, str]]:
        """Returns for each part the whole names that it holds, in the module's order, each with its first name."""
        trace = self._trace
        called = [{_without_number(call) for node in (*a, *b) for call in calls_of(node)} for a, b in parts]
        names_of: dict[str, list[str]] = defaultdict(list)
        for name in (*trace.forms, *trace.aliases, *trace.constants):
            names_of[trace.aliases.get(name, name)].append(name)
        assigned: list[dict[str, str]] = [{} for _ in parts]
        for first, names in names_of.items():
            users = [number for number, uses in enumerate(self._uses) if first in uses]
            form = trace.forms.get(first)
            if form is None or not form.parameter:
                for number in users or [_nearest(first, called)]:
                    assigned[number][first] = first
                continue
            without = list(users)
            for name in names:
                near = [number for number in users if name.rpartition(".")[0] in called[number]]
                free = [number for number in near if number in without] or near
                number = (free or users or [_nearest(name, called)])[0]
                assigned[number][name] = first
                without = [user for user in without if user != number]
            if users and users[0] in without:  # it owns the parameter, so it has the name
                holder = next(number for number in users if first in assigned[number])
                del assigned[holder][first]
                assigned[users[0]][first] = first
                without[without.index(users[0])] = holder
            for again, number in enumerate(without, start=1):
                assigned[number][f"{first}{AGAIN}{again}"] = first
        order = {name: place for place, name in enumerate((*trace.forms, *trace.aliases, *trace.constants))}
        return [dict(sorted(names.items(), key=lambda item: order.get(item[0], len(order)))) for names in assigned]


def _without_number(call: str) -> str:
    return ".".join(part.partition(AGAIN)[0] for part in call.split("."))


def _nearest(name: str, called: Sequence[set[str]]) -> int:
    """Returns the part whose calls are nearest to a name that nothing uses; the last of equal ones."""
    path = name.split(".")

    def common(calls: set[str]) -> int:
        return max((_common(path, call.split(".")) for call in calls), default=0)

    return max(range(len(called)), key=lambda number: (common(called[number]), number))


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _layer_names(parts: Sequence[Part], held: Sequence[dict[str, str]]) -> list[str]:
    total = Counter(call for training, _ in parts for node in training for call in calls_of(node))
    names: list[str] = []
    for (training, _), names_held in zip(parts, held, strict=True):
        here = Counter(call for node in training for call in calls_of(node))
        whole = [call for call in here if here[call] == total[call]]
        outer = [call for call in whole if not any(call.startswith(f"{other}.") for other in whole)]
        with_weights = [call for call in outer if any(name.startswith(f"{call}.") for name in names_held)]
        chosen = with_weights or outer or list(here)[-1:] or ["module"]
        single = len(chosen) == 1 and all(name.startswith(f"{chosen[0]}.") for name in names_held)
        name = chosen[0] if single else _span(chosen[0], chosen[-1])
        again = sum(other.partition("~")[0] == name for other in names)
        names.append(f"{name}~{again + 1}" if again else name)
    return names


def _span(first: str, last: str) -> str:
    """Returns both ends; the last one without what it has in common with the first."""
    if first == last:
        return f"{first}{SPAN}"
    shared = _common(first.split("."), last.split(".")[:-1])
    return f"{first}{SPAN}{'.'.join(last.split('.')[shared:])}"
