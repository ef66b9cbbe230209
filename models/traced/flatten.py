"""Makes one plain graph of an exported program: every node a function of tensors, sizes and constants.

torch.export leaves blocks without gradient as inner graphs, operations that change a tensor in place, and checks of
what it assumed. Here inner graphs are put in place, an in-place operation becomes its functional twin wherever that is
the same, and checks are dropped. Where a change in place stays, no cut may come between the tensor's first use and it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from .module import Untraceable
from .operations import (
    ATTENTION,
    LSTM,
    attention_with_trained_mask,
    enter_autocast,
    leave_autocast,
    lstm_with_graph,
)
from .own_backward import functions

ROOT = "L__self__"  # of nn_module_stack's keys
CHECKS = ("_assert", "sym_constrain_range", "assert_")  # names of operations that only check
IN_PLACE = "in_place"  # key of a node's meta: the operation that the module has there
INNER = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


@dataclass
class Flat:
    """Holds a plain graph.

    Attributes:
        graph: its placeholders are those of `inputs` and of `held`.
        inputs: placeholders of the micro-batch's tensors.
        held: placeholders of parameters, buffers and constants, with their names.
        parameters: those of parameters.
        output: the node whose value the module returns.
        forbidden: pairs of nodes between which no cut may come.
    """

    graph: fx.Graph
    inputs: list[fx.Node] = field(default_factory=list)
    held: dict[fx.Node, str] = field(default_factory=dict)
    parameters: set[fx.Node] = field(default_factory=set)
    output: fx.Node | None = None
    forbidden: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    @property
    def nodes(self) -> list[fx.Node]:
        """Returns all nodes but placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


def flatten(program: ExportedProgram, inside: str, aliases: Mapping[str, str], constants: dict[str, Tensor]) -> Flat:
    """Returns the plain graph of a program.

    Args:
        inside: prefix of the names in the program, taken off.
        aliases: further name of a tensor -> its first name.
        constants: gets the tensors that are neither parameters nor buffers: without values, where they are attributes.
    """
    flat = Flat(fx.Graph())
    env: dict[fx.Node, Any] = {}
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    module = program.graph_module
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        copy = env[node] = flat.graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        spec = kinds[node.name]
        if spec.kind == InputKind.USER_INPUT:
            flat.inputs.append(copy)
            continue
        name = str(spec.target).removeprefix(inside)
        if spec.kind == InputKind.CONSTANT_TENSOR and name not in aliases:
            constants[name] = program.constants[str(spec.target)]
        flat.held[copy] = aliases.get(name, name)
        if spec.kind == InputKind.PARAMETER:
            flat.parameters.add(copy)
    flattener = _Flattener(flat)
    answers = flattener.put(module, module.graph, env)
    flat.output = answers[0]
    flat.graph.output(flat.output)
    flat.graph.eliminate_dead_code(_has_effect)
    _keep_kernels(flat)
    kept = set(flat.graph.nodes)
    flat.forbidden = [pair for pair in flattener.forbidden if pair[0] in kept and pair[1] in kept]
    return flat


class _Flattener:
    """Copies graphs into one, inner ones where they are called."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._base: dict[fx.Node, fx.Node] = {}  # of the new graph: a tensor -> the one whose memory it may share
        self.forbidden: list[tuple[fx.Node, fx.Node]] = []

    def put(self, module: torch.nn.Module, graph: fx.Graph, env: dict[fx.Node, Any]) -> list[Any]:
        """Copies a graph whose placeholders ``env`` holds; returns its outputs."""
        for node in graph.nodes:
            if node.op == "output":
                return [env.get(item, item) for item in node.args[0]]
            if node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(module)
            elif node.op == "call_function" and node not in env:
                self._put_node(node, env)
        return []

    def _put_node(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name in INNER:
            env[node] = self._put_inner(name, node, env)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):  # type: ignore[index]
            env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name.startswith(CHECKS):
            env[node] = None
        elif not self._put_in_place(node, env):
            env[node] = self._copy(node, env)
            for user in node.users:  # the parts of a list beside it, so that no list ever passes a cut
                if user.target is operator.getitem and user not in env:
                    env[user] = self._copy(user, env)

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        copy = self._flat.graph.node_copy(node, lambda old: env[old])
        copy.target = functions.get(copy.target, copy.target)
        copy.meta = dict(node.meta)
        self._note_alias(copy)
        return copy

    def _put_inner(self, name: str, node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
        graph = self._flat.graph
        at = next(number for number, given in enumerate(node.args) if isinstance(given, fx.Node))
        inner: Any = env[node.args[at]]  # type: ignore[index]
        values = [env[given] if isinstance(given, fx.Node) else given for given in node.args[at + 1 :]]
        placeholders = [inside for inside in inner.graph.nodes if inside.op == "placeholder"]
        within: dict[fx.Node, Any] = dict(zip(placeholders, values, strict=True))
        if name == "wrap_with_autocast":
            enter = graph.call_function(enter_autocast, tuple(node.args[:at]))
            answers = self.put(inner, inner.graph, within)
            leave = graph.call_function(leave_autocast, (enter,))
            self.forbidden.append((enter, leave))
            return answers
        answers = self.put(inner, inner.graph, within)
        return answers if node.args[0] else [self._detached(answer) for answer in answers]

    def _detached(self, answer: Any) -> Any:
        value = answer.meta.get("val") if isinstance(answer, fx.Node) else None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return answer
        detached = self._flat.graph.call_function(torch.ops.aten.detach.default, (answer,))
        detached.meta = dict(answer.meta)
        return detached

    def _put_in_place(self, node: fx.Node, env: dict[fx.Node, Any]) -> bool:
        """Copies an operation that changes its first argument; returns False for other operations."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not node.args:
            return False
        if "out" in node.kwargs:
            raise Untraceable("here an operation writes into `out`, as spectral_norm does in every step", _place(node))
        changed_before: Any = node.args[0]
        changed = env[changed_before]
        base = self._base_of(changed)
        if base in self._flat.parameters:
            said = f"here forward changes the parameter {self._flat.held[base]}, and a micro-batch may go forward twice"
            raise Untraceable(f"{said} (max_norm of nn.Embedding does so too)", _place(node))
        if self._flat.held.get(base, "").endswith("num_batches_tracked"):  # the engine counts
            env[node] = changed
            return True
        others = [
            old
            for old, new in env.items()
            if isinstance(new, fx.Node) and new is not changed and self._base_of(new) is base and _used_later(old, node)
        ]
        functional = _functional(target)
        if functional is None or others or changed in self._flat.held:
            copy = self._copy(node, env)
            env[node] = copy
            if base not in self._flat.held:
                self.forbidden.append((base, copy))
            return True
        copy = self._flat.graph.node_copy(node, lambda old: env[old])
        copy.target, copy.meta = functional, {**node.meta, IN_PLACE: target}
        for old, new in list(env.items()):
            if new is changed:
                env[old] = copy
        env[node] = copy
        return True

    def _base_of(self, node: fx.Node) -> fx.Node:
        while node in self._base:
            node = self._base[node]
        return node

    def _note_alias(self, copy: fx.Node) -> None:
        """Notes that a node may share the memory of its first argument."""
        if not copy.args:
            return
        first = copy.args[0]
        views = isinstance(copy.target, torch._ops.OpOverload) and any(
            answer.alias_info is not None for answer in copy.target._schema.returns
        )
        if isinstance(first, fx.Node) and (views or copy.target is operator.getitem):
            self._base[copy] = first


def _place(node: fx.Node) -> str | None:
    """Returns file and line of the code from which a node comes, if it is not torch's own."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}, line {line}" for file, line in places if "torch" not in Path(file).parts]
    return own[-1] if own else None


def _keep_kernels(flat: Flat) -> None:
    """Replaces LSTMs, and attention whose mask has a gradient: re-materialization must not change the kernel."""
    trained = set(flat.parameters)
    for node in flat.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        floating = any(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
        if floating and node.target is not torch.ops.aten.detach.default and trained & set(node.all_input_nodes):
            trained.add(node)
        if node.target is LSTM:
            node.target = lstm_with_graph
        if node.target is ATTENTION and len(node.args) > 3 and node.args[3] in trained:
            node.target = attention_with_trained_mask


def _functional(target: torch._ops.OpOverload) -> Any:
    """Returns the operation that gives the value of an in-place one and changes nothing; None if there is none."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _used_later(node: fx.Node, than: fx.Node) -> bool:
    return any(user > than for user in node.users)


def _has_effect(node: fx.Node) -> bool:
    """Returns whether a node must stay although no other node uses its value."""
    target = node.target
    if node.op in ("placeholder", "output") or target in (enter_autocast, leave_autocast):
        return True
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
