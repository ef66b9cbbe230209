"""Makes one plain graph of an exported program: every node a function of tensors, sizes and constants.

torch.export leaves blocks without gradient as inner graphs, operations that change a tensor in place, and checks of
what it assumed. Here inner graphs are put in place, and checks are dropped. No cut may come between a tensor's first
use and a change of it in place. A parameter that is kept elsewhere too, as in a list, is that parameter.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .module import Untraceable
from .own_backward import functions

WRAPPER = "module"  # attribute of `Called` with which names in an exported program begin
ROOT = "L__self__"  # how the keys of nn_module_stack begin
CHECKS = ("_assert", "sym_constrain_range", "assert_")  # names of operations that only check
INNER = {"wrap_with_set_grad_enabled": torch.set_grad_enabled, "wrap_with_autocast": torch.autocast}  # blocks of code
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
BATCH_NORM = torch.ops.aten.batch_norm.default
LSTM = torch.ops.aten.lstm.input


@dataclass
class Flat:
    """Holds a plain graph.

    Attributes:
        graph: its placeholders are those of `inputs` and of `held`.
        inputs: placeholders of the micro-batch's tensors.
        held: placeholders of parameters, buffers and constants, with their names.
        parameters: those of parameters.
        outputs: the nodes whose values the module returns.
        forbidden: pairs of nodes between which no cut may come.
        constant: nodes that are computed without gradients.
    """

    graph: fx.Graph
    inputs: list[fx.Node] = field(default_factory=list)
    held: dict[fx.Node, str] = field(default_factory=dict)
    parameters: set[fx.Node] = field(default_factory=set)
    outputs: tuple[fx.Node, ...] = ()
    forbidden: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    constant: set[fx.Node] = field(default_factory=set)

    @property
    def nodes(self) -> list[fx.Node]:
        """Returns all nodes but placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


def flatten(
    program: ExportedProgram,
    aliases: Mapping[str, str],
    named: Sequence[tuple[str, nn.Parameter]],
    constants: dict[str, Tensor],
) -> Flat:
    """Returns the plain graph of a program.

    Args:
        program: the exported program of a `Called`.
        aliases: further name of a tensor -> its first name.
        named: the module's parameters with their names.
        constants: gets the tensors that are neither parameters nor buffers. Those that are attributes of the module
            have no values.
    """
    flat = Flat(fx.Graph())
    parameters = {_form(parameter): (name, parameter) for name, parameter in reversed(named)}
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
        name = str(spec.target).removeprefix(f"{WRAPPER}.")
        name, constant = aliases.get(name, name), program.constants.get(str(spec.target))
        shared = parameters.get(_form(constant)) if constant is not None else None
        if shared is not None:  # such as a weight in a list
            name, copy.meta["val"] = shared
        elif isinstance(constant, nn.Parameter) and constant.requires_grad:
            said = (
                "here forward uses a parameter that the module has not registered: use nn.ModuleList, no list or lambda"
            )
            raise Untraceable(said, place_of((*node.users, node)[0]))
        elif spec.kind == InputKind.CONSTANT_TENSOR and constant is not None:
            while constants.setdefault(name, constant) is not constant:  # the other graph has another of this name
                name += "_again"
        flat.held[copy] = name
        if spec.kind == InputKind.PARAMETER or shared is not None:
            flat.parameters.add(copy)
    flat.outputs = tuple(_Flattener(flat).put(module, module.graph, env))
    flat.graph.output(flat.outputs)
    flat.graph.eliminate_dead_code(_has_effect)
    _keep_kernels(flat)
    kept = set(flat.graph.nodes)
    flat.forbidden = [pair for pair in flat.forbidden if pair[0] in kept and pair[1] in kept]
    return flat


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for two tensors if they are the same part of one memory, with gradient or not."""
    of_memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *of_memory, tensor.shape, tensor.stride(), tensor.requires_grad


class _Flattener:
    """Copies a program's graphs into one; an inner graph is copied to where it is called.

    In its methods ``env`` maps nodes of the program to nodes, or plain values, of the new graph.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._counted: set[str] = set()  # BatchNorms that forward has called

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
        """Copies a call, or what takes its place, and notes it in ``env``."""
        name = getattr(node.target, "__name__", str(node.target))
        if name in INNER:
            env[node] = self._put_inner(name, node, env)
        elif isinstance(node.target, torch._ops.HigherOrderOperator) or "functorch" in str(node.target.__module__):
            said = "here torch.cond, map or vmap runs code, which a layer cannot repeat"
            raise Untraceable(f"{said}: use torch.where, and write the dimension out", place_of(node))
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):  # type: ignore[index]
            env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name.startswith(CHECKS):
            env[node] = None
        elif not self._put_in_place(node, env):
            env[node] = self._copy(node, env)
            for user in node.users:  # a list's parts are taken at once, so that no list ever passes a cut
                if user.target is operator.getitem and user not in env:
                    env[user] = self._copy(user, env)

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        copy = self._flat.graph.node_copy(node, lambda old: env[old])
        copy.target = functions.get(copy.target, copy.target)
        copy.meta = dict(node.meta)
        return copy

    def _put_inner(self, name: str, node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
        """Copies a block with its context (`INNER`) between `enter` and `leave`; returns its outputs."""
        graph = self._flat.graph
        at = next(number for number, given in enumerate(node.args) if isinstance(given, fx.Node))
        inner: Any = env[node.args[at]]  # type: ignore[index]
        values = [env[given] if isinstance(given, fx.Node) else given for given in node.args[at + 1 :]]
        placeholders = [inside for inside in inner.graph.nodes if inside.op == "placeholder"]
        within: dict[fx.Node, Any] = dict(zip(placeholders, values, strict=True))
        is_grad = INNER[name] is torch.set_grad_enabled
        if is_grad and node.args[0]:  # enable_grad is dropped: re-materialization runs forward without a graph first
            return self.put(inner, inner.graph, within)
        before = set(graph.nodes)
        context = graph.call_function(enter, (name, *node.args[:at]))
        answers = self.put(inner, inner.graph, within)
        graph.call_function(leave, (context,))
        if is_grad:
            self._flat.constant |= set(graph.nodes) - before
        return answers

    def _put_in_place(self, node: fx.Node, env: dict[fx.Node, Any]) -> bool:
        """Copies an operation that changes its first argument; returns False for other operations."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not node.args:
            return False
        changed: Any = env[node.kwargs.get("out", node.args[0])]  # type: ignore[index]
        base = base_of(changed)
        if (name := self._flat.held.get(base)) is not None:
            owner, _, kind = name.rpartition(".")
            if kind != "num_batches_tracked":
                kind = "the parameter " if base in self._flat.parameters else ""
                said = f"here forward changes {kind}{name} in place, which recomputing would repeat"
                raise Untraceable(said, place_of(node))
            if owner in self._counted:
                raise Untraceable(f"here the BatchNorm {owner} is called once more: use one for each", place_of(node))
            self._counted.add(owner)
            env[node] = changed  # dropped here, because the engine counts BatchNorm's batches
            return True
        env[node] = self._copy(node, env)
        self._flat.forbidden.append((base, env[node]))
        return True


def viewed(node: fx.Node) -> fx.Node | None:
    """Returns the first argument of an operation whose result may share its memory; None for others."""
    first, target = next(iter(node.args), None), node.target
    shares = isinstance(target, torch._ops.OpOverload) and any(answer.alias_info for answer in target._schema.returns)
    return first if isinstance(first, fx.Node) and (shares or target is operator.getitem) else None


def base_of(node: fx.Node) -> fx.Node:
    """Returns the node that made the memory in which a node's value lies."""
    while (of := viewed(node)) is not None:
        node = of
    return node


def place_of(node: fx.Node) -> str | None:
    """Returns file and line of the user's code that made a node; None if only torch's did."""
    places = re.findall(r'File "([^"<]+)", line (\d+)', node.meta.get("stack_trace") or "")
    ours = Path(__file__).parent
    own = [f"{f}, line {line}" for f, line in places if "torch" not in Path(f).parts and Path(f).parent != ours]
    return own[-1] if own else None


def _keep_kernels(flat: Flat) -> None:
    """Replaces operations whose kernel would change in re-materialization: LSTMs, attention with a trained mask.

    Parameters that meet a tensor without elements get no gradient, as in the module (`unless_empty`).
    """
    trained = set(flat.parameters)
    for node in flat.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        floating = any(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
        is_constant = node.target is torch.ops.aten.detach.default or node in flat.constant
        if floating and not is_constant and trained & set(node.all_input_nodes):
            trained.add(node)
        if node.target is LSTM:
            node.target = lstm_with_graph
        if node.target is ATTENTION and len(node.args) > 3 and node.args[3] in trained:
            node.target = attention_with_trained_mask
        if empty := [given for given in node.all_input_nodes if _may_be_empty(given.meta.get("val"))]:
            for parameter in flat.parameters & set(node.all_input_nodes):
                with flat.graph.inserting_before(node):
                    used = flat.graph.call_function(unless_empty, (parameter, empty[0]))
                used.meta = {**node.meta, "val": parameter.meta["val"]}
                node.replace_input_with(parameter, used)


def _may_be_empty(value: Any) -> bool:
    """Returns whether a tensor may have no element, and the module's code then leaves something out."""
    if not isinstance(value, Tensor):
        return False
    sizes: list[Any] = [size for size in value.shape if isinstance(size, torch.SymInt)]
    return any(hasattr(size.node.shape_env, "may_be_empty") and free_unbacked_symbols(size) for size in sizes)


def is_view_of_parameter(flat: Flat, node: fx.Node) -> bool:
    """Returns whether the node is a part or another form of a parameter, in its memory."""
    while node not in flat.parameters:
        of, changes = viewed(node), getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if of is None or changes or len(node.all_input_nodes) != 1 or node in flat.constant:
            return False
        node = of
    return True


def _has_effect(node: fx.Node) -> bool:
    """Returns whether a node must stay although no other node uses its value."""
    target = node.target
    if node.op in ("placeholder", "output") or target in (enter, leave):
        return True
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


# -- operations of these graphs beside torch's own ---------------------------------------------------------------------


def enter(kind: str, *arguments: Any) -> Any:
    """Enters the autocast, or torch.no_grad, that a module's code asks for; returns it for `leave`."""
    context: Any = INNER[kind](*arguments)
    context.__enter__()
    return context


def leave(context: Any) -> None:
    """Leaves what `enter` entered."""
    context.__exit__(None, None, None)


def attention_with_trained_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any, **more: Any
) -> Any:
    """Returns attention whose mask has a gradient, by the same kernel whether gradients are wanted or not.

    torch chooses the kernel by whether the mask requires a gradient, and re-materialization runs forward without.
    """
    if torch.is_grad_enabled():
        return ATTENTION(query, key, value, mask, *rest, **more)
    with torch.enable_grad():
        return ATTENTION(query, key, value, mask.detach().requires_grad_(), *rest, **more).detach()


def unless_empty(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the parameter, detached if the tensor that it meets has no elements."""
    return parameter if tensor.numel() else parameter.detach()


def lstm_with_graph(*arguments: Any) -> tuple[Tensor, ...]:
    """Returns an LSTM's outputs by the kernel for gradients, even where none are wanted; oneDNN has two kernels."""
    if torch.is_grad_enabled():
        return tuple(LSTM(*arguments))
    with torch.enable_grad():
        return tuple(output.detach() for output in LSTM(*arguments))
