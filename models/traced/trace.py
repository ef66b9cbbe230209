"""Traces a module with torch.export, once as it trains and once as it is evaluated.

Code that branches on a size of its inputs was traced for one branch: the trace holds for sizes that take the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from ...cpu import seeded
from .flatten import Flat, flatten, place_of
from .module import Example, TracedFrom, Untraceable, autocast_of
from .recording import ConstructorRecord, NotRecordable, recorded
from .refusals import TraceError, explained, name_of, refuse_module, told_with_place
from .traceable import Traceable, fixed_at, traceable

ROUNDED = re.compile(r"math\.trunc.* == \d+$")  # a condition that remains of int() of a size


class SizeError(ValueError):
    """Raised for inputs of a size for which a module was not traced; names the size and the line that asks for it."""


@dataclass(frozen=True)
class SizeCondition:
    """Describes a condition on the sizes of the inputs.

    Attributes:
        code: a Python expression of `tensors`, as ``tensors[0].size()[1] <= 64``.
        place: file and line of the code that asks for it; None where it is a library's.
    """

    code: str
    place: str | None = None

    @cached_property
    def holds(self) -> Callable[[Sequence[Tensor]], bool]:
        """Returns a function that says whether inputs fulfil it."""
        names = {"math": math, "torch": torch}  # which torch.export's conditions use
        function: Callable[[Sequence[Tensor]], bool] = eval(f"lambda tensors: {self.code}", names)
        return function

    def __str__(self) -> str:
        shown = re.sub(r"tensors\[(\d+)\]\.size\(\)\[(\d+)\]", _shown, self.code)
        return f"{shown} ({self.place})" if self.place else shown


def _shown(size: re.Match[str]) -> str:
    number, dimension = size.groups()
    return f"(size {dimension} of input {number})" if int(dimension) else "(number of examples)"


@dataclass(frozen=True)
class Trace:
    """Holds the graphs and tensors that tracing has found.

    Attributes:
        training, evaluation: the two graphs.
        held: all parameters and buffers, and other tensors that the constructor made, on meta, by their first names.
        persistent: names of those that are in the state_dict.
        aliases: further names of a tensor, such as those of tied weights: name -> first name.
        constants: tensors that the code made.
        recording: the constructor's operations; None where it must run for real.
        conditions: conditions on the sizes of the inputs.
        answer: turns output tensors into what the module returns, such as a dict.
        kept: attributes in which the module's forward keeps tensors; the layers do not.
    """

    training: Flat
    evaluation: Flat
    held: dict[str, Tensor]
    persistent: set[str]
    aliases: dict[str, str]
    constants: dict[str, Tensor]
    recording: ConstructorRecord | None
    conditions: list[SizeCondition]
    answer: Callable[[Sequence[Tensor]], Any]
    kept: set[str]

    def is_parameter(self, name: str) -> bool:
        """Returns whether a first name is that of a parameter."""
        return isinstance(self.held.get(name), nn.Parameter)


def without_values(tensor: Tensor) -> Tensor:
    """Returns a new, unfilled tensor or parameter of the same form, on torch's current default device."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def traced(traced_from: TracedFrom, example: Example) -> Trace:
    """Traces a module.

    Args:
        traced_from: constructor, call and seed of the module.
        example: type and shape of each input tensor.

    Raises:
        TraceError: it cannot be traced.
    """
    constructor, seed = traced_from.constructor, traced_from.seed
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        try:
            module, recording = recorded(constructor, seed, fake)
        except NotRecordable:
            with seeded(seed):
                module, recording = constructor(), None
    except Exception as error:
        raise TraceError(f"{name_of(constructor)} cannot be constructed: {told_with_place(error)}") from error
    try:
        refuse_module(module)
        with torch.no_grad():  # which code may do that changes weights where the mode changes
            module.train()
        called = Traceable(module, traced_from.call)
        return _traced(called, recording, partial(_programs, called, example, fake, traced_from.autocast))
    except Exception as error:
        raise TraceError(explained(error, constructor)) from error


def _traced(
    called: Traceable, recording: ConstructorRecord | None, export: Callable[[], list[ExportedProgram]]
) -> Trace:
    """Returns what was found in a module: its graphs, tensors and their names.

    Args:
        called: the module, before any call.
        recording: operations of the constructor; None where it must run for real.
        export: function that exports the module for training and for evaluation, which may change it.
    """
    module = called.module
    first_name: dict[int, str] = {}  # id of a tensor -> the first of its names; the others are its aliases
    parameters = [*nn.Module.named_parameters(module, remove_duplicate=False)]  # the class may have one of its own
    named: list[tuple[str, Tensor]] = [*parameters, *nn.Module.named_buffers(module, remove_duplicate=False)]
    for name, tensor in named:
        first_name.setdefault(id(tensor), name)
    with torch.device("meta"):
        held = {name: without_values(tensor) for name, tensor in named if first_name[id(tensor)] == name}
    aliases = {name: first_name[id(tensor)] for name, tensor in named if name != first_name[id(tensor)]}
    persistent = {*module.state_dict().keys()}
    programs, constants = export(), dict[str, Tensor]()
    graphs = training, evaluation = [flatten(p, aliases, parameters, constants) for p in programs]
    for name in [name for name, constant in constants.items() if isinstance(constant, FakeTensor)]:
        # A fake constant is a tensor that is neither a parameter nor a buffer. Its values come from the constructor's
        # operations, by its name; a parameter among them is frozen.
        constant = constants.pop(name).detach()
        with torch.device("meta"):
            held[name] = without_values(constant)
        if recording is None or not recording.name(name, constant):
            holders = [node for flat in graphs for node, held_name in flat.held.items() if held_name == name]
            users = [user for node in holders for user in node.users]
            place = place_of(users[0]) if users else None
            raise Untraceable("here forward uses a tensor that an earlier call made and kept, as lru_cache does", place)
    conditions = [*dict.fromkeys(chain(*map(_conditions_of, programs, graphs)))]  # each once
    return Trace(
        training, evaluation, held, persistent, aliases, constants, recording, conditions, called.answer, called.kept
    )


def _programs(called: Traceable, example: Example, fake: FakeTensorMode, autocast: str | None) -> list[ExportedProgram]:
    """Exports a module for training and for evaluation; its code's printing is suppressed."""
    with fake:  # without values; two examples, because torch.export takes a size of 1 for a constant
        inputs = tuple(torch.zeros(2, *shape[1:], dtype=getattr(torch, dtype)) for dtype, shape in example)
    try:
        with traceable(), autocast_of(autocast)():
            training = _export(called, inputs)
            with torch.no_grad():  # as evaluation runs, which code may ask
                return [training, _export(called.eval(), inputs)]
    finally:
        called.before.restore()


def _export(called: Traceable, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Exports for any number of examples, and any length of token sequences where the module allows it.

    Tried in order: int() of a size as a number, then as a size; each with lengths free, then fixed.
    """
    batch: list[tuple[int, ...]] = [(0,) for _ in inputs]
    whole = [(0, 1) if not t.is_floating_point() and t.dim() == 2 else (0,) for t in inputs]
    refusals: list[Exception] = []
    rounded = None  # a program that holds only for some sizes, because int() of one became a number
    for numbers_follow in (False, True):
        called.numbers_follow = numbers_follow
        for dynamic in (whole, batch) if whole != batch else (batch,):
            called.before.restore()
            try:
                program = _export_with(called, inputs, dynamic)
            except Exception as error:
                refusals.append(error)
                continue
            if not any(ROUNDED.search(code) for code in program._guards_code):
                return program
            rounded = rounded or program
            break
        if rounded is None and not isinstance(refusals[-1], Untraceable):
            break
    if rounded is not None:
        return rounded
    raise refusals[0 if whole == batch else 1]


def _export_with(called: Traceable, inputs: tuple[Tensor, ...], dynamic: Sequence[tuple[int, ...]]) -> ExportedProgram:
    """Exports with these dimensions of each input free.

    Raises:
        Untraceable: the program holds only for one number of examples.
    """
    fixed_at.clear()
    shapes: Any = (tuple(dict.fromkeys(dimensions, Dim.AUTO) for dimensions in dynamic),)
    program = torch.export.export(called, inputs, dynamic_shapes=shapes, strict=False)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and kinds.get(node.name) == InputKind.USER_INPUT and isinstance(value, Tensor):
            fixed = _fixed(value.shape[0])
            if fixed is not None:
                said = (
                    f"here the code holds only for mini-batches of {fixed} examples: leave their number a size, as in "
                    "h / len(h) or h.view(-1, 8), and compute all of them at once, in place of a loop"
                )
                raise Untraceable(said, fixed_at.get(fixed))
    return program


def _fixed(size: Any) -> int | None:
    """Returns an input's size if the trace takes it for a constant, None if it may vary."""
    found: int | None = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return found


# -- sizes -------------------------------------------------------------------------------------------------------------


def _conditions_of(program: ExportedProgram, flat: Flat) -> list[SizeCondition]:
    """Returns torch.export's assumptions about the sizes of the inputs, and the sizes that it took for constants."""
    place = _place_of_guards(flat.inputs)
    codes = [code.replace("L['tensors']", "tensors") for code in program._guards_code]
    for number, node in enumerate(flat.inputs):
        for dimension, size in enumerate(node.meta["val"].shape):
            fixed = _fixed(size)
            if fixed is not None:
                codes.append(f"tensors[{number}].size()[{dimension}] == {fixed}")
    return [SizeCondition(code, place) for code in dict.fromkeys(codes)]


def _place_of_guards(inputs: Sequence[fx.Node]) -> str | None:
    """Returns file and line of the user's code that asked for the first assumption; None if only torch's did."""
    sizes = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
    environment: Any = sizes[0].node.shape_env if sizes else None
    guards = environment.guards if environment is not None else []
    frames = [guard.sloc.framework_loc for guard in guards]
    own = [f for f in frames if isinstance(f, FrameSummary) and "torch" not in Path(f.filename).parts]
    return f"{own[0].filename}, line {own[0].lineno}" if own else None
