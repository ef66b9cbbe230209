"""Finds tied parameters, which several layers use, such as one table for embedding and softmax, before a run begins.

Layers tie them by builders that return one module or one parameter, or declare it (`LayerBuilder.tied`).
"""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..pipeline.randomness import COSTS, seeded
from .fake_layers import TensorShape, build_key, build_without_memory, fake_mode

# Weak references: the builders keep alive what they share, and everything else is freed at once.
Holders = dict[int, tuple[weakref.ref[nn.Parameter], Owner]]


@dataclass(frozen=True)
class Ties:
    """Describes the parameters that layers of a model use after an earlier layer: the owner, the first that uses them.

    Attributes:
        owners: for every layer, the owner of each such parameter, by its own name; the first one, where the layer has
            the parameter under several.
        own: for every layer, its other parameters: name, form, and whether each is trained.
    """

    owners: list[dict[str, Owner]]
    own: list[list[tuple[str, TensorShape, bool]]]


@dataclass(frozen=True)
class _Parameter:
    """Describes one parameter of a layer.

    Attributes:
        names: all that it has in the layer.
        owner: in the first layer that holds this very object; None: this layer.
    """

    names: tuple[str, ...]
    form: TensorShape
    trained: bool
    owner: Owner | None

    def __str__(self) -> str:
        return f"{self.form}{'' if self.trained else ', frozen'}"


def find_ties(builders: Sequence[LayerBuilder]) -> Ties:
    """Finds the tied parameters of a model.

    Raises:
        CostError: a layer cannot be built.
        ConfigurationError: a declared tie cannot be, or two parameters have one name; it names both layers.
    """
    ties = Ties([], [])
    holders: Holders = {}
    of_equal: dict[Hashable, list[list[_Parameter]]] = {}
    known: dict[str, tuple[_Parameter, Owner]] = {}  # by full name, of the layers so far
    with seeded(COSTS):
        for index, builder in enumerate(builders):
            equal = of_equal.setdefault(build_key(builder, index), [])
            if len(equal) < 2:  # a third of equal layers shares what the second does
                equal.append(_parameters(builder, holders))
            parameters = equal[-1]
            declared = _declared(builder, parameters, known)
            owners = {one.names[0]: declared.get(one.names[0], one.owner) for one in parameters}
            tied = {name: owner for name, owner in owners.items() if owner is not None}
            for one in parameters:
                owner = tied.get(one.names[0], Owner(builder.name, one.names[0]))
                for full in (f"{builder.name}.{name}" for name in one.names):
                    if full in known:
                        other = known[full][1].layer
                        raise ConfigurationError(f"layers {other!r} and {builder.name!r} both have {full}: rename one")
                    known[full] = one, owner
            ties.owners.append(tied)
            ties.own.append([(one.names[0], one.form, one.trained) for one in parameters if one.names[0] not in tied])
    return ties


def _parameters(builder: LayerBuilder, holders: Holders) -> list[_Parameter]:
    objects: dict[int, tuple[nn.Parameter, list[str]]] = {}
    module = build_without_memory(builder, fake_mode())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        objects.setdefault(id(parameter), (parameter, []))[1].append(name)
    found = []
    for parameter, names in objects.values():
        holder, owner = holders.get(id(parameter), (None, None))
        shared = holder is not None and holder() is parameter
        if not shared:
            holders[id(parameter)] = weakref.ref(parameter), Owner(builder.name, names[0])
        form, trained = TensorShape.of(parameter), parameter.requires_grad
        found.append(_Parameter(tuple(names), form, trained, owner if shared else None))
    return found


def _declared(
    builder: LayerBuilder, parameters: Sequence[_Parameter], known: Mapping[str, tuple[_Parameter, Owner]]
) -> dict[str, Owner]:
    """Returns the owners that the builder declares, by the first name of the parameter."""
    own = {name: parameter for parameter in parameters for name in parameter.names}
    found = {}
    for name, other in builder.tied.items():
        tie = f"layer {builder.name!r}: its parameter {name!r} is tied to {other!r}"
        if name not in own:
            raise ConfigurationError(f"{tie}, but it has only {', '.join(own) or 'no parameters'}")
        if other not in known:
            raise ConfigurationError(f"{tie}, which is no parameter of an earlier layer: write <layer>.<parameter>")
        (there, owner), here = known[other], str(own[name])
        if here != str(there):
            raise ConfigurationError(f"{tie}, but one is {here} and the other {there}: they must be alike")
        found[own[name].names[0]] = owner
    return found
