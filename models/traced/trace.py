"""Traces a module with torch.export, once as it trains and once as it is evaluated."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import place_in_users_code
from .flatten import Flat, flatten, memory_of, place_of
from .kept_state import KeptState
from .module import Call, Called, CallError, Constructor, Untraceable
from .operations import CUMULATIVE
from .own_backward import own_backward_kept
from .recording import ConstructorRecord, NotRecordable, recorded, seeded, without_logs
from .refusals import WAY_OUT, TraceError, explained, name_of, refuse_module, refusing_what_gets_lost
from .sizes import SizeCondition, conditions_of

Example = Sequence[tuple[str, Sequence[int]]]  # (dtype, shape) of each input tensor of a micro-batch
INSIDE = "module."  # what the names in an exported program begin with


@dataclass(frozen=True)
class Form:
    """Describes a parameter or buffer without its values.

    Attributes:
        shape, dtype: of the tensor.
        parameter: True for a parameter.
        trained: whether the parameter has a gradient.
        persistent: False for a buffer that stands in no state_dict.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    trained: bool = False
    persistent: bool = True

    def empty(self) -> Tensor:
        """Returns a new tensor of this form."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        return nn.Parameter(tensor, requires_grad=self.trained) if self.parameter else tensor


@dataclass(frozen=True)
class Trace:
    """Holds what tracing found.

    Attributes:
        training, evaluation: the two graphs.
        forms: of all parameters and buffers, each under its first name.
        aliases: further names of a tensor, such as those of tied weights: name -> first name.
        constants: tensors that are neither: made by the code, or attributes of a module, these without values.
        recording: of the constructor; None where it must run for real.
        conditions: that the sizes of the inputs must fulfil.
    """

    training: Flat
    evaluation: Flat
    forms: dict[str, Form]
    aliases: dict[str, str]
    constants: dict[str, Tensor]
    recording: ConstructorRecord | None
    conditions: list[SizeCondition]


def traced(
    constructor: Constructor, call: Call, example: Example, seed: int = 0, float_type: torch.dtype = torch.float32
) -> Trace:
    """Traces the module that ``constructor`` makes.

    Args:
        seed: of torch, numpy and Python when it is made.
        float_type: in which it is traced, in place of float32.

    Raises:
        TraceError: it cannot be traced.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        module, recording = _without_memory(constructor, seed, fake)
    except Exception as error:
        place, said = place_in_users_code(error), f"{type(error).__name__}: {error}"
        raise TraceError(
            f"{name_of(constructor)} cannot be constructed: {f'{place}: ' if place else ''}{said}"
        ) from error
    try:
        refuse_module(module)
        for part in module.modules():
            if isinstance(part, _BatchNorm) and part.momentum is None:
                part.momentum = CUMULATIVE
        if float_type is not torch.float32:
            _widen(module, float_type)
        forms, aliases = _forms(module.train())
        programs = _programs(Called(module, call), example, fake)
    except Exception as error:
        raise TraceError(explained(error, constructor)) from error
    try:
        return _trace(programs, module, forms, aliases, recording)
    except Untraceable as error:
        raise TraceError(explained(error, constructor)) from error


def _programs(called: Called, example: Example, fake: FakeTensorMode) -> list[ExportedProgram]:
    """Exports a module for training and for evaluation; what its code prints is suppressed."""
    prints, inputs, kept = StringIO(), _inputs(example, fake), KeptState(called)
    with (
        without_logs(),
        warnings.catch_warnings(),
        redirect_stdout(prints),
        redirect_stderr(prints),
        own_backward_kept(),
        refusing_what_gets_lost(),
    ):
        warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights")  # nn.LSTM assigns them in every call
        with kept.noted():
            programs = [_export(called.train(), inputs, kept)]
            with torch.no_grad():  # as evaluation runs, which code may ask
                programs.append(_export(called.eval(), inputs, kept))
        with fake:
            kept.refuse_what_is_kept(inputs)
        return programs


def _trace(
    programs: Sequence[ExportedProgram],
    module: nn.Module,
    forms: dict[str, Form],
    aliases: dict[str, str],
    recording: ConstructorRecord | None,
) -> Trace:
    constants: dict[str, Tensor] = {}
    parameters = {memory_of(parameter): (name, parameter) for name, parameter in module.named_parameters()}
    graphs = [flatten(program, INSIDE, aliases, parameters, constants) for program in programs]
    for name, constant in constants.items():
        if isinstance(constant, FakeTensor) and (recording is None or not recording.name(name, constant)):
            users = [user for flat in graphs for node, held in flat.held.items() if held == name for user in node.users]
            place = place_of(users[0]) if users else None
            raise Untraceable("here forward uses a tensor that an earlier call made and kept, as lru_cache does", place)
    conditions = [
        c for program, flat in zip(programs, graphs, strict=True) for c in conditions_of(program, flat.inputs)
    ]
    return Trace(graphs[0], graphs[1], forms, aliases, constants, recording, list(dict.fromkeys(conditions)))


def _without_memory(
    constructor: Constructor, seed: int, fake: FakeTensorMode
) -> tuple[nn.Module, ConstructorRecord | None]:
    """Constructs the module on fake tensors; for real where its constructor looks at values."""
    try:
        return recorded(constructor, seed, fake)
    except NotRecordable:
        with seeded(seed):
            return constructor(), None


def _widen(module: nn.Module, float_type: torch.dtype) -> None:
    """Replaces the parameters and buffers in float32; those that are one tensor stay one.

    `nn.Module.to` refuses fake parameters.
    """
    wide: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.dtype is not torch.float32:
                    continue
                if id(tensor) not in wide:
                    value = tensor.detach().to(float_type)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    wide[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                held[name] = wide[id(tensor)]  # type: ignore[assignment]


def _inputs(example: Example, fake: FakeTensorMode) -> tuple[Tensor, ...]:
    """Returns inputs without values; two examples, because torch.export takes a size of 1 for a constant."""
    with fake:
        return tuple(torch.zeros(2, *shape[1:], dtype=getattr(torch, dtype)) for dtype, shape in example)


def _forms(module: nn.Module) -> tuple[dict[str, Form], dict[str, str]]:
    forms: dict[str, Form] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    persistent = module.state_dict().keys()
    named: list[tuple[str, Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        is_parameter = isinstance(tensor, nn.Parameter)
        shape = tuple(tensor.shape)
        forms[name] = Form(shape, tensor.dtype, is_parameter, tensor.requires_grad, name in persistent)
    return forms, aliases


def _export(called: Called, inputs: tuple[Tensor, ...], kept: KeptState) -> ExportedProgram:
    """Exports with a batch of any size; token sequences may have any length too, where the module allows it."""
    texts = [not tensor.is_floating_point() and tensor.dim() == 2 for tensor in inputs]
    whole: list[tuple[int, ...]] = [(0, 1) if text else (0,) for text in texts]
    batch: list[tuple[int, ...]] = [(0,) for _ in inputs]
    tries = [whole, batch] if any(texts) else [batch]
    failure: Exception | None = None
    for dynamic in tries:
        kept.restore()
        try:
            return _export_with(called, inputs, dynamic)
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def _export_with(called: Called, inputs: tuple[Tensor, ...], dynamic: list[tuple[int, ...]]) -> ExportedProgram:
    shapes: Any = (tuple(dict.fromkeys(dimensions, Dim.AUTO) for dimensions in dynamic),)
    program = torch.export.export(called, inputs, dynamic_shapes=shapes, strict=False)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder" and kinds.get(node.name) == InputKind.USER_INPUT:
            value = node.meta.get("val")
            size = value.shape[0] if isinstance(value, Tensor) else None
            fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
            if fixed is not None:
                raise CallError(f"its code holds only for mini-batches of {fixed} examples: {WAY_OUT}")
    return program
