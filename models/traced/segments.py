"""Divides the two graphs of a traced module at the chosen boundaries: one segment for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from .cuts import Boundary
from .flatten import IN_PLACE, Flat
from .names import Names
from .operations import BATCH_NORM, CUMULATIVE
from .positions import CutPoint, is_size
from .sizes import SizeCondition
from .trace import Trace

# Operations with a result of its own that no backward reads, and activations that may overwrite it: their backward
# reads what they return. Both save memory and time.
OVERWRITABLE = (
    BATCH_NORM,
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.add.Tensor,
)
OVERWRITING = (torch.ops.aten.relu_.default, torch.ops.aten.relu6_.default, torch.ops.aten.hardtanh_.default)


@dataclass(frozen=True)
class BatchNorm:
    """Holds the settings of a BatchNorm that normalises by the micro-batch's statistics."""

    dimensions: int
    features: int
    eps: float
    momentum: float | None
    affine: bool


@dataclass
class Segment:
    """Describes one layer.

    Attributes:
        name: of the layer.
        held: parameters, buffers and constants: name within the layer -> first name in the module.
        tied: parameters that an earlier layer holds too: name within the layer -> (layer, name there).
        batchnorms: by the name of their module within the layer.
        training, evaluation: the graphs.
        conditions: that the sizes of the inputs must fulfil; only the first layer has any.
    """

    name: str
    held: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    batchnorms: dict[str, BatchNorm] = field(default_factory=dict)
    training: fx.Graph = field(default_factory=fx.Graph)
    evaluation: fx.Graph = field(default_factory=fx.Graph)
    conditions: list[SizeCondition] = field(default_factory=list)


def segments_of(trace: Trace, boundaries: Sequence[Boundary]) -> list[Segment]:
    """Returns the layers of a traced module, in order."""
    training = _Parts(trace.training, [boundary.training for boundary in boundaries])
    evaluation = _Parts(trace.evaluation, [boundary.evaluation for boundary in boundaries])
    names = Names(trace, [*zip(training.nodes, evaluation.nodes, strict=True)])
    segments = []
    for number, name in enumerate(names.layers):
        segment = Segment(name, names.held[number], names.tied[number])
        local = names.local[number]
        segment.training = training.graph(number, local, segment.batchnorms)
        segment.evaluation = evaluation.graph(number, local, {})
        segments.append(segment)
    segments[0].conditions = trace.conditions
    return segments


class _Parts:
    """Holds one graph with its cuts, and makes the graph of each part.

    A number that follows from shapes does not pass a cut: it is worked out again behind it from the sizes of what
    passes. A size that no passing tensor has travels as the shape of an empty tensor.
    """

    def __init__(self, flat: Flat, cuts: Sequence[CutPoint]) -> None:
        self._flat = flat
        nodes = flat.nodes
        positions = [0, *(cut.position for cut in cuts), len(nodes)]
        self.nodes = [nodes[first:last] for first, last in pairwise(positions)]
        assert flat.output is not None
        self._passing = [tuple(flat.inputs), *(cut.alive for cut in cuts), (flat.output,)]
        self._missing = [self._sizes_that_no_tensor_has(number) for number in range(len(positions))]

    def _sizes_that_no_tensor_has(self, boundary: int) -> list[str]:
        behind = [node for part in self.nodes[boundary:] for node in part]
        inside, wanted = set(behind), set()
        for node in behind:
            for argument in node.all_input_nodes:
                if argument.op == "call_function" and argument not in inside and is_size(argument):
                    wanted |= set(_leaves(argument))
        return sorted(wanted - _sizes(self._passing[boundary]).keys())

    def graph(self, number: int, local: Mapping[str, str], batchnorms: dict[str, BatchNorm]) -> fx.Graph:
        """Returns the graph of a part; its placeholders are the tensors that pass the boundary in front of it.

        Args:
            local: first name of a held tensor -> its name within the layer.
            batchnorms: gets those that become modules.
        """
        return _PartGraph(self._flat, local, batchnorms).made(
            self.nodes[number], self._passing[number : number + 2], self._missing[number : number + 2]
        )


def _leaves(size: fx.Node) -> list[str]:
    """Returns the sizes of tensors from which a number follows, as expressions."""
    if size.target is torch.ops.aten.sym_size.int:
        return [str(size.meta["val"])]
    return [leaf for argument in size.all_input_nodes for leaf in _leaves(argument)]


def _sizes(tensors: Sequence[fx.Node]) -> dict[str, tuple[fx.Node, int]]:
    """Returns where each computed size stands: expression -> (tensor, dimension)."""
    return {
        str(size): (tensor, dimension)
        for tensor in reversed(tensors)
        for dimension, size in reversed([*enumerate(tensor.meta["val"].shape)])
        if isinstance(size, torch.SymInt)
    }


class _PartGraph:
    """Makes the graph of one part."""

    def __init__(self, flat: Flat, local: Mapping[str, str], batchnorms: dict[str, BatchNorm]) -> None:
        self._flat, self._local, self._batchnorms = flat, local, batchnorms
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[str, tuple[fx.Node, int]] = {}  # expression -> (node of the new graph, dimension)
        self._device: fx.Node | None = None
        self._made: set[fx.Node] = set()

    def made(
        self, nodes: Sequence[fx.Node], passing: Sequence[Sequence[fx.Node]], missing: Sequence[Sequence[str]]
    ) -> fx.Graph:
        """Returns the graph of ``nodes``, between two boundaries."""
        graph = self._graph
        for node in passing[0]:
            self._env[node] = graph.placeholder(node.name)
        for size, (node, dimension) in _sizes(passing[0]).items():
            self._sizes[size] = self._env[node], dimension
        if missing[0]:
            carrier = graph.placeholder("sizes")
            self._sizes |= {size: (carrier, dimension) for dimension, size in enumerate(missing[0], start=1)}
        self._made = set(nodes)
        for node in nodes:
            self._put(node)
        outputs = [self._value(node) for node in passing[1]]
        if missing[1]:
            sizes = [self._size(size) for size in missing[1]]
            place = self._on_device()
            outputs.append(graph.call_function(torch.empty, ([0, *sizes],), {"dtype": torch.int8, "device": place}))
        graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        graph.lint()
        return graph

    def _put(self, node: fx.Node) -> None:
        if self._put_batch_norm(node):
            return
        copy = self._graph.node_copy(node, self._value)
        copy.args = fx.node.map_aggregate(copy.args, self._on_this_device)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._on_this_device)
        copy.meta = {}
        if self._may_overwrite(node):
            copy.target = node.meta[IN_PLACE]
        self._env[node] = copy
        if node.target is torch.ops.aten.sym_size.int and isinstance(node.meta["val"], torch.SymInt):
            tensor, dimension = copy.args
            self._sizes.setdefault(str(node.meta["val"]), (tensor, dimension))  # type: ignore[arg-type]

    def _may_overwrite(self, node: fx.Node) -> bool:
        """Returns whether an activation that works in place in the module may do so here, and is cheaper then."""
        if node.meta.get(IN_PLACE) not in OVERWRITING:
            return False
        given: Any = node.args[0]
        return given in self._made and given.target in OVERWRITABLE and list(given.users) == [node]

    def _value(self, node: fx.Node) -> fx.Node:
        """Returns the node of this part that stands for ``node``: made here, passed in, held, or worked out again."""
        if node in self._env:
            return self._env[node]
        if node in self._flat.held:
            self._env[node] = self._graph.get_attr(self._local[self._flat.held[node]])
        elif node.target is torch.ops.aten.sym_size.int:
            self._env[node] = self._size(str(node.meta["val"]))
        else:
            self._env[node] = self._graph.node_copy(node, self._value)
        return self._env[node]

    def _size(self, size: str) -> fx.Node:
        tensor, dimension = self._sizes[size]
        return self._graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))

    def _on_this_device(self, argument: Any) -> Any:
        return self._on_device() if isinstance(argument, torch.device) else argument

    def _on_device(self) -> fx.Node:
        """Returns the node of the device on which the layer runs: that of its first input."""
        if self._device is None:
            first = next(iter(self._graph.nodes))
            with self._graph.inserting_after(first):
                self._device = self._graph.call_function(getattr, (first, "device"))
        return self._device

    def _put_batch_norm(self, node: fx.Node) -> bool:
        """Makes a BatchNorm that uses the micro-batch's statistics a module, which the engine replaces by its own."""
        if node.target is not BATCH_NORM or not node.args[5] or node.args[3] not in self._flat.held:
            return False
        given, weight, _, mean = node.args[:4]
        path = self._local[self._flat.held[mean]].rpartition(".")[0]  # type: ignore[index]
        value: Tensor = given.meta["val"]  # type: ignore[union-attr]
        factor, eps = float(node.args[6]), float(node.args[7])  # type: ignore[arg-type]
        momentum = None if factor == CUMULATIVE else factor
        features = int(value.shape[1])
        self._batchnorms[path] = BatchNorm(value.dim(), features, eps, momentum, weight is not None)
        self._env[node] = self._graph.call_module(path, (self._value(given),))  # type: ignore[arg-type]
        return True
