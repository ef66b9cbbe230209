"""Makes a list of layers of any `nn.Module`: `model=module model.module._target_=torchvision.models.resnet50`.

Each layer has the module's own weights under the module's own names, and its code in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from pydantic import SkipValidation
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...cpu import seeded
from ...errors import ConfigurationError
from ...layers import LayerBuilder
from ...typed_section import CountOrZero, Positive
from .cuts import choose_cuts
from .module import Call, Constructor, Example, InDefaultType, TracedFrom, autocast_of
from .recording import NotRecordable
from .segments import Segment, segments_of
from .trace import SizeCondition, SizeError, Trace, traced, without_values


def layers(
    module: Constructor,
    example: SkipValidation[Example],
    seed: int = 0,
    inputs: Sequence[str] | None = None,
    output: str | int | None = None,
    arguments: Mapping[str, Any] | None = None,
    masks: Mapping[str, str] | None = None,
    pad_id: CountOrZero = 0,
    mean: Sequence[float] | None = (0.5, 0.5, 0.5),
    std: Sequence[Positive] = (0.5, 0.5, 0.5),
    labels: Sequence[str] | None = None,
    ignored: int | None = None,
    autocast: str | None = None,
    trust: bool = False,
) -> list[LayerBuilder]:
    """Returns the layers of a traced module; their parameters keep the module's own names.

    Args:
        module: function, or class, that makes the module and takes no arguments.
        example: (dtype, shape) of each input tensor of a micro-batch; the number of examples does not matter.
        seed: seed of its weights, as after ``torch.manual_seed(seed)``.
        inputs, output, arguments, masks, pad_id, mean, std, labels, ignored: fields of `Call`.
        autocast: type of the autocast that the layers will run under.
        trust: True if the layers may train without having been compared with the module.

    Raises:
        TraceError: the module cannot be traced; the message says where and what to do.
    """
    if not callable(module) or isinstance(module, nn.Module):
        shown = module if isinstance(module, str) else f"a {type(module).__name__}"
        raise ConfigurationError(
            f"model.module={shown}: name what makes the module, as model.module._target_=torchvision.models.resnet18, "
            "and leave model.module._partial_ as it is"
        )
    call = Call(inputs, output, arguments or {}, masks or {}, pad_id, mean, std, labels, ignored)
    # Equal texts mean equal arguments: a text has an object's address, and the kept list holds the object.
    key = repr((module, example, seed, call, autocast, trust, torch.get_default_dtype()))
    if key not in _known:
        _known.clear()
        _known[key] = traced_layers(TracedFrom(InDefaultType(module), call, seed, autocast, trust), example)
    return _known[key]


_known: dict[str, list[LayerBuilder]] = {}  # the last module's layers: gpipe-verify asks for them again and again


def traced_layers(traced_from: TracedFrom, example: Example) -> list[LayerBuilder]:
    """Traces a module and divides it into layers; the arguments are those of `layers`."""
    trace = traced(traced_from, example)
    weights = Weights(trace, traced_from)
    return [
        LayerBuilder(segment.name, LayerMaker(segment, trace, weights, traced_from), tied=segment.tied)
        for segment in segments_of(trace, choose_cuts(trace.training, trace.evaluation))
    ]


# -- one layer ---------------------------------------------------------------------------------------------------------


class TracedLayer(nn.Module):
    """Runs a segment of a traced module: its training graph in training, else that for evaluation.

    Args:
        segment: functions of the layer, and the conditions that the sizes of its inputs must fulfil.
        autocast: type of the autocast under which the module was traced; None: there was none.
    """

    graph_varies = False  # see the engine's cells

    def __init__(self, segment: Segment, autocast: str | None) -> None:
        super().__init__()
        self._segment, self._conditions, self._autocast = segment, segment.conditions, autocast

    def forward(self, argument: Tensor | tuple[Tensor, ...]) -> Any:
        tensors = (argument,) if isinstance(argument, Tensor) else argument
        for condition in self._conditions:
            if not condition.holds(tensors):
                sizes = " and ".join(" × ".join(map(str, tensor.shape)) for tensor in tensors)
                raise SizeError(
                    f"the module was traced for inputs where {condition}, and gets {sizes}: bring inputs to one size, "
                    "or write the model as a list of layers, which takes any"
                )
        device = tensors[0].device.type
        has_context = device == "meta" or torch.is_autocast_enabled(device)  # a run has entered autocast already
        with autocast_of(None if has_context else self._autocast, device)():
            run = self._segment.training if self.training else self._segment.evaluation
            return run(self, *tensors)

    def require(self, examples: int, tokens: int) -> None:
        """Makes the layer refuse fewer examples, and texts of fewer tokens. A number of 1 refuses nothing."""
        other = "with fewer the module itself does something else"
        texts = "tensor.size()[1] for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()"
        codes = {f"tensors[0].size()[0] >= {examples}": examples, f"min({texts}) >= {tokens}": tokens}
        least = [SizeCondition(code, other) for code, number in codes.items() if number > 1]
        self._conditions = (*self._conditions, *least)


class Weights:
    """Makes the module's tensors and gives them to the layers that hold them.

    The first `take` makes the tensors of all layers that were announced, and keeps them until those layers take theirs.

    Args:
        trace: graphs and tensors of the module.
        traced_from: constructor, call and seed of the module.

    Attributes:
        shared_with: a module whose own tensors the layers get; of layers that hold the same tensor the first gets it,
            the others get a copy. None: tensors are made anew.
    """

    def __init__(self, trace: Trace, traced_from: TracedFrom) -> None:
        self._trace, self._traced_from = trace, traced_from
        self._announced: dict[str, set[str]] = {}  # by layer
        self._made: dict[str, dict[str, Tensor]] = {}  # by layer
        self.shared_with: nn.Module | None = None
        self._given: set[str] = set()  # of that module's tensors

    def announce(self, layer: str, names: Iterable[str]) -> None:
        """Notes that a layer will take these tensors."""
        self._announced[layer] = {*names}

    def take(self, layer: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns a layer's tensors by name."""
        names, trace = {*names}, self._trace
        here = torch.empty(0)
        if here.is_meta or isinstance(here, FakeTensor):
            forms = trace.held | trace.constants
            return {name: without_values(forms[name]) for name in names}
        if self.shared_with is not None:
            return {name: self._of_module(name, self.shared_with) for name in names}
        if layer not in self._made:
            self._announced[layer] = names
            layers, self._announced = self._announced, {}
            tensors, given = self._construct({*chain(*layers.values())}), set[str]()
            for other, held in layers.items():
                self._made[other] = {name: _own(tensors[name], trace.held.get(name), name in given) for name in held}
                given |= held
        return self._made.pop(layer)

    def _of_module(self, name: str, module: nn.Module) -> Tensor:
        """Returns a tensor of the module itself, or a copy if a layer has it already."""
        constants, is_given = self._trace.constants, name in self._given
        tensor: Tensor = constants[name].clone() if name in constants else attrgetter(name)(module)
        self._given.add(name)
        if is_given or not isinstance(tensor, nn.Parameter):
            return _own(tensor.detach(), self._trace.held.get(name), is_given)
        return tensor

    def _construct(self, names: set[str]) -> dict[str, Tensor]:
        """Makes these tensors as the constructor does under the seed: by its recorded operations, or by calling it."""
        trace = self._trace
        tensors = {name: trace.constants[name].clone() for name in names & trace.constants.keys()}
        rest = names - tensors.keys()
        if trace.recording is not None:
            with suppress(NotRecordable):
                return tensors | trace.recording.made(rest)
        with seeded(self._traced_from.seed):
            module = self._traced_from.constructor()
        return tensors | {name: attrgetter(name)(module).detach() for name in rest}


def _own(tensor: Tensor, form: Tensor | None, shared: bool) -> Tensor:
    """Returns a tensor for one layer: a copy if another layer has it (``shared``), a parameter if ``form`` is one."""
    own = tensor.clone() if shared else tensor
    return nn.Parameter(own, form.requires_grad) if isinstance(form, nn.Parameter) else own


@dataclass(frozen=True, eq=False)
class LayerMaker:
    """Builds one layer; the `build` of its LayerBuilder.

    Attributes:
        segment: the layer's part of the module.
        trace: graphs and tensors of the whole module.
        weights: source of the tensors of all layers.
        traced_from: constructor, call and seed of the module.
    """

    segment: Segment
    trace: Trace
    weights: Weights
    traced_from: TracedFrom

    def announce(self) -> None:
        """Notes that this process will build the layer."""
        self.weights.announce(self.segment.name, self.segment.held.values())

    def __call__(self) -> TracedLayer:
        segment = self.segment
        tensors = self.weights.take(segment.name, segment.held.values())
        layer = TracedLayer(segment, self.traced_from.autocast)
        for path, (kind, arguments) in segment.batchnorms.items():
            holder, name = _holder(layer, path)
            with torch.device("meta"):
                setattr(holder, name, getattr(nn, kind)(*arguments))
        for path, first in segment.held.items():
            (holder, name), tensor = _holder(layer, path), tensors[first]
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(name, tensor)
            else:
                holder.register_buffer(name, tensor, persistent=first in self.trace.persistent)
        return layer


def _holder(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Returns the module that holds a dotted name, and the name's last part; makes the modules on the way."""
    *way, name = path.split(".")
    for part in way:
        child = layer._modules.get(part)
        if child is None:
            child = nn.Module()
            layer.add_module(part, child)
        layer = child
    return layer, name
