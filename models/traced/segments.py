"""Divides the two graphs of a traced module at the chosen boundaries: one segment for each layer.

Layers are named after the calls in them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...layers import AGAIN, SPAN
from .cuts import Boundary, CutPoint, calls_of, sizes_of
from .flatten import BATCH_NORM, Flat, enter, is_view_of_parameter, leave
from .trace import SizeCondition, Trace

Forward = Callable[..., Any]
BatchNorm = tuple[str, tuple[Any, ...]]
Part = tuple[Sequence[fx.Node], Sequence[fx.Node]]  # nodes of the training graph and of that for evaluation


def compiled(graph: fx.Graph, layer: str) -> Forward:
    """Compiles a graph to a function; its first argument is the layer, which holds the tensors."""
    code = graph.python_code(root_module="self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<layer {layer}>", "exec"), namespace)  # defines forward()
    return cast(Forward, namespace["forward"])


@dataclass(frozen=True)
class Segment:
    """Describes one layer.

    Attributes:
        name: name of the layer.
        held: parameters, buffers and constants: name within the layer -> first name in the module.
        tied: parameters that an earlier layer holds too: name within the layer -> (layer, name there).
        batchnorms: class of torch.nn and its arguments, by name within the layer.
        training, evaluation: functions of the layer and its inputs, made of the two graphs.
        conditions: conditions on the sizes of the inputs; only the first layer has any.
    """

    name: str
    held: dict[str, str]
    tied: dict[str, str]
    batchnorms: dict[str, BatchNorm]
    training: Forward
    evaluation: Forward
    conditions: Sequence[SizeCondition]


def segments_of(trace: Trace, boundaries: Sequence[Boundary]) -> list[Segment]:
    """Returns a segment for each layer of a traced module, in order."""
    training = _Parts(trace.training, [cut for cut, _ in boundaries])
    evaluation = _Parts(trace.evaluation, [cut for _, cut in boundaries])
    parts = [*zip(training.nodes, evaluation.nodes, strict=True)]
    whole = _assigned(trace, parts)
    owners: dict[str, tuple[str, str]] = {}  # of parameters, by first name: the first layer, and the name there
    segments: list[Segment] = []
    for number, (name, names) in enumerate(zip(_layer_names(parts, whole), whole, strict=True)):
        prefix = "" if SPAN in name else f"{name}."
        held = {full.removeprefix(prefix): first for full, first in names.items()}
        tied, batchnorms = {}, dict[str, BatchNorm]()
        for own, first in held.items():
            owner, its_name = owners.setdefault(first, (name, own))
            if owner != name and trace.is_parameter(first):
                tied[own] = f"{owner}.{its_name}"
        local = {first: own for own, first in reversed(held.items())}
        trains = compiled(_PartGraph(training, number, local, batchnorms).made(), name)
        evaluates = compiled(_PartGraph(evaluation, number, local, {}).made(), name)
        conditions = () if segments else trace.conditions
        segments.append(Segment(name, held, tied, batchnorms, trains, evaluates, conditions))
    return segments


class _Parts:
    """Holds one graph, divided at its cuts.

    Only tensors pass a cut. A number that follows from shapes is computed again behind it, from their sizes.

    Attributes:
        nodes: those of each part.
        passing: the tensors in front of the first part, at each cut, and behind the last part.
        open: the contexts that are entered at these places.
    """

    def __init__(self, flat: Flat, cuts: Sequence[CutPoint]) -> None:
        self.flat = flat
        nodes = flat.nodes
        positions = [0, *(cut.position for cut in cuts), len(nodes)]
        self.nodes = [nodes[first:last] for first, last in pairwise(positions)]
        self.passing = [tuple(flat.inputs), *(cut.alive for cut in cuts), flat.outputs]
        self.open = [_entered(nodes[:position]) for position in positions]


def _entered(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the contexts that these nodes enter and do not leave."""
    known = set(nodes)
    return [node for node in nodes if node.target is enter and not known & node.users.keys()]


class _PartGraph:
    """Makes the graph of one part, between two cuts. Its placeholders are the tensors that pass the first.

    Args:
        number: index of the part.
        local: first name of a held tensor -> its name within the layer.
        batchnorms: gets the BatchNorms that become modules.
    """

    def __init__(self, parts: _Parts, number: int, local: Mapping[str, str], batchnorms: dict[str, BatchNorm]) -> None:
        self._parts, self._number, self._held = parts, number, parts.flat.held
        self._local, self._batchnorms = local, batchnorms
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[str, tuple[fx.Node, int]] = {}  # expression -> (node of the new graph, dimension)
        self._device: fx.Node | None = None

    def made(self) -> fx.Graph:
        """Makes the graph. A context that is open at the cut is entered again here, and left at the end."""
        graph, parts, here, behind = self._graph, self._parts, self._number, self._number + 1
        for node in parts.passing[here]:
            self._env[node] = graph.placeholder(node.name)
        for size, (node, dimension) in sizes_of(parts.passing[here]).items():
            self._sizes[size] = self._env[node], dimension
        for node in (*parts.open[here], *parts.nodes[here]):
            self._put(node)
        for node in reversed(parts.open[behind]):
            graph.call_function(leave, (self._env[node],))
        outputs = [self._value(node) for node in parts.passing[behind]]
        graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        graph.lint()
        return graph

    def _put(self, node: fx.Node) -> None:
        """Copies a node to this part, and notes the sizes that it asks for."""
        if self._put_batch_norm(node):
            return
        copy = self._graph.node_copy(node, self._value)
        copy.args = fx.node.map_aggregate(copy.args, self._on_this_device)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._on_this_device)
        copy.meta = {}
        self._env[node] = copy
        if node.target is torch.ops.aten.sym_size.int and isinstance(node.meta["val"], torch.SymInt):
            tensor, dimension = copy.args
            self._sizes.setdefault(str(node.meta["val"]), (tensor, dimension))  # type: ignore[arg-type]

    def _value(self, node: fx.Node) -> fx.Node:
        """Returns the node of this part that stands for ``node``: made here, passed in, held, or worked out again."""
        if node in self._env:
            return self._env[node]
        if node in self._held:
            self._env[node] = self._graph.get_attr(self._local[self._held[node]])
        elif node.target is torch.ops.aten.sym_size.int:
            self._env[node] = self._graph.call_function(node.target, self._sizes[str(node.meta["val"])])
        else:
            self._env[node] = self._graph.node_copy(node, self._value)
        return self._env[node]

    def _on_this_device(self, argument: Any) -> Any:
        """Returns an argument; in place of a device the node of that on which the layer runs, its first input's."""
        if not isinstance(argument, torch.device):
            return argument
        if self._device is None:
            first = next(iter(self._graph.nodes))
            with self._graph.inserting_after(first):
                self._device = self._graph.call_function(getattr, (first, "device"))
        return self._device

    def _put_batch_norm(self, node: fx.Node) -> bool:
        """Turns a BatchNorm over the micro-batch's statistics into a module, which the engine replaces by its own.

        Returns False for other nodes. Other uses of the statistics stay as they are; recomputing would repeat them, and
        the comparison with the module itself shows it.
        """
        if node.target is not BATCH_NORM or not node.args[5] or node.args[3] not in self._held:
            return False
        given, weight = node.args[:2]
        names: list[str | None] = [self._held.get(argument) for argument in node.args[1:5]]  # type: ignore[arg-type]
        owner, path = (name.rpartition(".")[0] for name in (names[2] or "", self._local[names[2] or ""]))
        own = [
            weight and f"{owner}.weight",
            weight and f"{owner}.bias",
            f"{owner}.running_mean",
            f"{owner}.running_var",
        ]
        if names != own:
            return False
        value: Tensor = given.meta["val"]  # type: ignore[union-attr]
        momentum, eps = float(node.args[6]), float(node.args[7])  # type: ignore[arg-type]
        kind = f"BatchNorm{max(1, value.dim() - 2)}d"
        self._batchnorms[path] = kind, (int(value.shape[1]), eps, momentum, weight is not None)
        self._env[node] = self._graph.call_module(path, (self._value(given),))  # type: ignore[arg-type]
        return True


# -- names -------------------------------------------------------------------------------------------------------------


def _assigned(trace: Trace, parts: Sequence[Part]) -> list[dict[str, str]]:
    """Decides which names of tensors each part holds: full name -> first name, in the module's order.

    A tensor that nothing uses goes to the part with the nearest calls.
    """
    uses = [_used(trace, part) for part in parts]
    called = [{_without_number(call) for node in (*a, *b) for call in calls_of(node)} for a, b in parts]
    every_name = [*trace.held, *trace.aliases, *trace.constants]
    names_of: dict[str, list[str]] = defaultdict(list)
    for name in every_name:
        names_of[trace.aliases.get(name, name)].append(name)
    assigned: list[dict[str, str]] = [{} for _ in parts]
    for first, names in names_of.items():
        users = [number for number, used in enumerate(uses) if first in used]
        if trace.is_parameter(first):
            for name, number in _holders(names, users, called):
                assigned[number][name] = first
        else:
            for number in users or [_nearest(first, called)]:
                assigned[number][first] = first
    order = {name: place for place, name in enumerate(every_name)}
    return [dict(sorted(names.items(), key=lambda item: order.get(item[0], len(order)))) for names in assigned]


def _holders(names: Sequence[str], users: Sequence[int], called: Sequence[set[str]]) -> list[tuple[str, int]]:
    """Decides which part holds a parameter under each of its names: pairs of a name and the number of a part.

    Each part that uses the parameter gets one of its names, or a new one (`AGAIN`). The first of them owns it.

    Args:
        names: all names of the parameter in the module.
        users: numbers of the parts that use it.
        called: modules that each part calls.
    """
    first, holders = names[0], dict[str, int]()
    without = list(users)  # parts that have no name for it yet
    for name in names:
        near = [number for number in users if name.rpartition(".")[0] in called[number]]
        free = [number for number in near if number in without]
        holders[name] = (free or near or users or [_nearest(name, called)])[0]
        without = [user for user in without if user != holders[name]]
    if users and users[0] in without:  # it owns the parameter, so it gets the first name
        without[0], holders[first] = holders[first], users[0]
    again = {f"{first}{AGAIN}{number}": part for number, part in enumerate(without, start=1)}
    return [*holders.items(), *again.items()]


def _used(trace: Trace, part: Part) -> set[str]:
    """Returns the first names of the tensors that the code of a part uses."""
    found = set()
    for flat, nodes in zip((trace.training, trace.evaluation), part, strict=True):
        for argument in {argument for node in nodes for argument in node.all_input_nodes}:
            while argument not in flat.held and is_view_of_parameter(flat, argument):
                argument = argument.all_input_nodes[0]
            found |= {flat.held[argument]} if argument in flat.held else set()
    return found


def _without_number(call: str) -> str:
    """Returns a call's module without the numbers of repeated calls: ``a.b`` for ``a@1.b``."""
    return ".".join(part.partition(AGAIN)[0] for part in call.split("."))


def _nearest(name: str, called: Sequence[set[str]]) -> int:
    """Returns the index of the part whose calls share most of a name's beginning; the last of equal ones."""
    path = name.split(".")

    def common(calls: set[str]) -> int:
        return max((_common(path, call.split(".")) for call in calls), default=0)

    return max(range(len(called)), key=lambda number: (common(called[number]), number))


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns how many first items two sequences have in common."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _layer_names(parts: Sequence[Part], held: Sequence[dict[str, str]]) -> list[str]:
    """Names each part after the outermost calls that lie wholly in it; several ones give ``first..last``."""
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
    """Returns ``first..last``, where the last call lacks the beginning that it shares with the first."""
    if first == last:
        return f"{first}{SPAN}"
    shared = _common(first.split("."), last.split(".")[:-1])
    return f"{first}{SPAN}{'.'.join(last.split('.')[shared:])}"
