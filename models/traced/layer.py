"""Builds one layer of a traced module: its weights under the module's own names, its code in both modes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from .module import Constructor, TracedFrom
from .recording import NotRecordable, seeded
from .segments import BatchNorm, Segment
from .sizes import SizeCondition, SizeError
from .trace import Trace

Forward = Callable[..., Any]


class TracedLayer(nn.Module):
    """Runs a segment of a traced module: its training graph in training, else that for evaluation.

    Args:
        training, evaluation: the compiled graphs.
        conditions: that the sizes of the inputs must fulfil.
        unfinished: is kept until the first forward, see `Weights`.
    """

    def __init__(
        self, training: Forward, evaluation: Forward, conditions: Sequence[SizeCondition], unfinished: object
    ) -> None:
        super().__init__()
        self._forwards, self._conditions, self._unfinished = (evaluation, training), conditions, unfinished

    def forward(self, argument: Tensor | tuple[Tensor, ...]) -> Any:
        self._unfinished = None
        tensors = (argument,) if isinstance(argument, Tensor) else argument
        for condition in self._conditions:
            if not condition.holds(tensors):
                raise SizeError(f"the module was traced for inputs where {condition}, and gets {_sizes(tensors)}")
        return self._forwards[self.training](self, *tensors)


def _sizes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(" × ".join(map(str, tensor.shape)) for tensor in tensors)


class _Drawn(dict[str, Tensor]):
    """Holds the tensors of a module that no layer has taken yet; unlike a plain dict it can have weak references."""


class Weights:
    """Makes the module's tensors and hands them out.

    A process makes those of all layers that it has announced at once, or those of the whole module if it has announced
    none: each layer takes its own, and what is left stays only until the first of these layers runs.

    Args:
        trace: of the module.
        constructor: makes it.
        seed: of torch, numpy and Python when it is made.
        shared: names of tensors that several layers hold.
    """

    def __init__(self, trace: Trace, constructor: Constructor, seed: int, shared: Iterable[str]) -> None:
        self._trace, self._constructor, self._seed, self._shared = trace, constructor, seed, set(shared)
        self._announced: set[str] = set()
        self._drawn: weakref.ref[_Drawn] | None = None

    def announce(self, names: Iterable[str]) -> None:
        """Notes that these tensors will be taken."""
        self._announced |= set(names)

    def take(self, names: Iterable[str]) -> tuple[dict[str, Tensor], object]:
        """Returns new tensors by name, and what the layer keeps until it runs."""
        names = set(names)
        here = torch.empty(0)
        if here.is_meta or isinstance(here, FakeTensor):
            return {name: self._without_values(name) for name in names}, None
        drawn = self._drawn() if self._drawn is not None else None
        if drawn is None or not names <= drawn.keys():
            wanted = self._announced if names <= self._announced else {*self._trace.forms, *self._trace.constants}
            drawn = _Drawn(self._construct(wanted))
            self._drawn, self._announced = weakref.ref(drawn), set()
        tensors = {name: drawn[name] for name in names}
        for name in names:
            if name in self._shared:
                tensors[name] = _clone(tensors[name])
            else:
                del drawn[name]
        return tensors, drawn

    def _without_values(self, name: str) -> Tensor:
        form = self._trace.forms.get(name)
        return (
            torch.empty_like(self._trace.constants[name], device=torch.get_default_device())
            if form is None
            else form.empty()
        )

    def _construct(self, names: set[str]) -> dict[str, Tensor]:
        """Returns these tensors of a module that the constructor makes under the seed."""
        trace = self._trace
        constants = {name: trace.constants[name] for name in names & trace.constants.keys()}
        tensors = {name: value.clone() for name, value in constants.items() if not isinstance(value, FakeTensor)}
        rest = names - tensors.keys()
        if trace.recording is not None:
            with suppress(NotRecordable):
                return tensors | {name: self._form(name, t) for name, t in trace.recording.made(rest).items()}
        with seeded(self._seed):
            module = self._constructor()
        return tensors | {name: self._form(name, attrgetter(name)(module).detach()) for name in rest}

    def _form(self, name: str, tensor: Tensor) -> Tensor:
        form = self._trace.forms.get(name)
        return nn.Parameter(tensor, form.trained) if form is not None and form.parameter else tensor


def _clone(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


class LayerMaker:
    """Builds one layer; the `build` of its LayerBuilder.

    Attributes:
        traced_from: of all layers of the module.
    """

    def __init__(self, segment: Segment, trace: Trace, weights: Weights, traced_from: TracedFrom) -> None:
        self._segment, self._trace, self._weights, self.traced_from = segment, trace, weights, traced_from
        self._forwards: tuple[Forward, Forward] | None = None

    @property
    def held(self) -> Mapping[str, str]:
        """Returns the names of the layer's tensors in the module: name within the layer -> first name."""
        return self._segment.held

    def announce(self) -> None:
        """Notes that this process will build the layer."""
        self._weights.announce(self._segment.held.values())

    def __call__(self) -> TracedLayer:
        segment = self._segment
        if self._forwards is None:
            self._forwards = _compiled(segment.training, segment.name), _compiled(segment.evaluation, segment.name)
        tensors, unfinished = self._weights.take(segment.held.values())
        layer = TracedLayer(*self._forwards, segment.conditions, unfinished)
        for path, settings in segment.batchnorms.items():
            holder, name = _holder(layer, path)
            setattr(holder, name, _batch_norm(settings))
        for path, first in segment.held.items():
            form = self._trace.forms.get(first)
            holder, name = _holder(layer, path)
            if form is not None and form.parameter:
                holder.register_parameter(name, tensors[first])  # type: ignore[arg-type]
            else:
                holder.register_buffer(name, tensors[first], persistent=form is not None and form.persistent)
        return layer


def _compiled(graph: fx.Graph, name: str) -> Forward:
    code = graph.python_code(root_module="self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<layer {name}>", "exec"), namespace)
    forward: Forward = namespace["forward"]
    return forward


def _batch_norm(settings: BatchNorm) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[settings.dimensions]
    with torch.device("meta"):
        return kind(settings.features, settings.eps, settings.momentum, settings.affine)


def _holder(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Returns the module in which the last part of a dotted name stands; modules on the way are made."""
    *way, name = path.split(".")
    for part in way:
        child = layer._modules.get(part)
        if child is None:
            child = nn.Module()
            layer.add_module(part, child)
        layer = child
    return layer, name
