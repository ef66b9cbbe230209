"""Surveys a model's layers in one pass, without memory: parameters, which of them are tied, what layers compute.

Layers that are built alike and get alike inputs are looked at once, so a model of thousands of layers takes as long as
one of each kind. Who needs only the parameters gives no inputs. What is found by running a layer is up to the caller:
FLOPs for a cut (`cost.py`), operations and bytes for a plan (`planner/measure`).

Tied parameters, which several layers use, such as one table for embedding and softmax, come from builders that return
one module or one parameter, or that declare it (`LayerBuilder.tied`).
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor, nn

from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..pipeline.messages.boundary import grouping_of
from ..pipeline.randomness import COSTS, seeded
from .fake_layers import CostError, Drawn, TensorShape, build_key, build_without_memory, fake_mode, measured_on_shapes


@dataclass(frozen=True, eq=False)
class ForwardFacts:
    """Describes the forward of one layer; equal layers of a model share one object.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention (a multiply-add counts two).
        outputs: shapes of the tensors that the next layer gets.
    """

    flops: float
    outputs: tuple[TensorShape, ...]

    @property
    def cost(self) -> float:
        """Returns its FLOPs and one for each number put out: elementwise work counts a little, no cost is zero."""
        return self.flops + max(1, sum(output.numel for output in self.outputs if output.dtype.is_floating_point))


F = TypeVar("F", bound=ForwardFacts)
Measure = Callable[..., F]
"""Returns the facts of a layer; called with the module, its inputs, and ``is_last``: the model ends with it."""


@dataclass(frozen=True)
class Parameter:
    """Describes one parameter of a layer.

    Attributes:
        name: the name that it has in the layer, the first where it has several.
        form: its shape, and whether it learns.
        owner: the earlier layer, and the name there, if the parameter is shared with one; None: the layer's own.
    """

    name: str
    form: TensorShape
    owner: Owner | None

    def __str__(self) -> str:
        return f"{self.form}{'' if self.form.requires_grad else ', frozen'}"


@dataclass(frozen=True)
class Survey(Generic[F]):
    """Holds what is known about the layers of a model.

    Attributes:
        names: name of each layer.
        parameters: the parameters of each layer.
        layers: facts of each layer that has run; equal layers share one object.
        joined: numbers of the layers behind which no cut may lie: shapes that they pass on depend on values.
        failure: error of the first layer that did not run; those behind it did not either. None where all did.
    """

    names: list[str]
    parameters: list[list[Parameter]]
    layers: list[F]
    joined: list[int]
    failure: CostError | None = None

    @property
    def owners(self) -> list[dict[str, Owner]]:
        """Returns for each layer the owners of its parameters that an earlier layer has, by their names here."""
        return [{one.name: one.owner for one in layer if one.owner is not None} for layer in self.parameters]

    @property
    def own(self) -> list[list[Parameter]]:
        """Returns the parameters of each layer that no earlier layer has."""
        return [[one for one in layer if one.owner is None] for layer in self.parameters]

    @property
    def sizes(self) -> list[int]:
        """Returns how many numbers the parameters of each layer have; a tied one counts in its owner's layer alone."""
        return [sum(one.form.numel for one in layer) for layer in self.own]


def survey(
    builders: Sequence[LayerBuilder], inputs: Sequence[Tensor] = (), measure: Measure[F] | None = None
) -> Survey[F]:
    """Finds the parameters of all layers and, with ``measure``, the facts of each.

    Args:
        inputs: inputs of a micro-batch, of which only the shapes matter.
        measure: called once for layers that are built alike and get alike inputs.

    Raises:
        CostError: a layer cannot be built.
        ConfigurationError: a declared tie cannot be, or two parameters have one name; it names both layers.
    """
    names = [builder.name for builder in builders]
    ties, failure = _TieSearch(), None
    known: dict[Hashable, tuple[F, Drawn | None]] = {}
    layers: list[F] = []
    joined: list[int] = []
    boundary, drawn = tuple(map(TensorShape.of, inputs)), None
    with seeded(COSTS):
        for index, builder in enumerate(builders):
            ties.add(builder, kind := build_key(builder, index))
            if measure is None or failure is not None:
                continue
            is_last = index == len(builders) - 1
            key = index if drawn else (kind, boundary, grouping_of(boundary), is_last)
            try:
                if key not in known:
                    known[key] = measured_on_shapes(builder, boundary, drawn, partial(measure, is_last=is_last))
            except CostError as error:
                failure = error
                continue
            facts, drawn = known[key]
            layers.append(facts)
            joined += [index] if drawn and not is_last else []
            boundary = facts.outputs
    return Survey(names, ties.found, layers, joined, failure)


class _TieSearch:
    """Finds the parameters of one layer after another, and those that an earlier layer has too.

    Attributes:
        found: the parameters of each layer so far.
    """

    def __init__(self) -> None:
        self.found: list[list[Parameter]] = []
        # Weak references: the builders keep alive what they share, and everything else is freed at once.
        self._holders: dict[int, tuple[weakref.ref[nn.Parameter], Owner]] = {}
        self._alike: dict[Hashable, list[list[Parameter]]] = {}  # by kind: parameters of the first and second layer
        self._known: dict[str, tuple[Parameter, Owner]] = {}  # by full name

    def add(self, builder: LayerBuilder, kind: Hashable) -> None:
        """Adds the parameters of the next layer.

        Args:
            kind: key that is equal for layers that are built alike.
        """
        alike = self._alike.setdefault(kind, [])
        if len(alike) < 2:  # a third of equal layers shares what the second does
            alike.append(self._built(builder))
        declared = self._declared(builder, alike[-1])
        own = [replace(one, owner=declared.get(one.name, one.owner)) for one in alike[-1]]
        for one in own:
            full = f"{builder.name}.{one.name}"
            if full in self._known:
                other = self._known[full][1].layer
                raise ConfigurationError(f"layers {other!r} and {builder.name!r} both have {full}: rename one")
            self._known[full] = one, one.owner or Owner(builder.name, one.name)
        self.found.append(own)

    def _built(self, builder: LayerBuilder) -> list[Parameter]:
        """Builds the layer, and returns its parameters; the owner of one that an earlier layer holds is that layer."""
        found = []
        for name, parameter in build_without_memory(builder, fake_mode()).named_parameters():
            holder, owner = self._holders.get(id(parameter), (None, None))
            if holder is None or holder() is not parameter:
                self._holders[id(parameter)] = weakref.ref(parameter), Owner(builder.name, name)
                owner = None
            found.append(Parameter(name, TensorShape.of(parameter), owner))
        return found

    def _declared(self, builder: LayerBuilder, parameters: Sequence[Parameter]) -> dict[str, Owner]:
        """Returns the owners that the builder declares, by the name of the parameter."""
        own = {parameter.name: parameter for parameter in parameters}
        found = {}
        for name, other in builder.tied.items():
            tie = f"layer {builder.name!r}: its parameter {name!r} is tied to {other!r}"
            if name not in own:
                raise ConfigurationError(f"{tie}, but it has only {', '.join(own) or 'no parameters'}")
            if other not in self._known:
                raise ConfigurationError(f"{tie}, which is no parameter of an earlier layer: write <layer>.<parameter>")
            there, owner = self._known[other]
            if str(own[name]) != str(there):
                raise ConfigurationError(f"{tie}, but one is {own[name]} and the other {there}: they must be alike")
            found[name] = owner
        return found
