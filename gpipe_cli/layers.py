"""Defines LayerBuilder: a model is a list of them (paper, section 2.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

AGAIN = "@"  # in the name of a parameter: a further use of one that is tied and has no other name of its own
SPAN = ".."  # in the name of a layer: several modules of a larger one, the first and the last, as ``conv1..bn1``


def own_name(layer: str, parameter: str) -> str:
    """Returns the name of a parameter or buffer in a plain state_dict: ``<layer>.<parameter>``.

    In a layer that spans several modules parameters have whole names already, as ``conv1.weight`` in ``conv1..bn1``.
    """
    return parameter if SPAN in layer else f"{layer}.{parameter}"


class Owner(NamedTuple):
    """Names a parameter that later layers use too: its layer, and its name there."""

    layer: str
    parameter: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.parameter}"


def announce(builders: Iterable[LayerBuilder]) -> None:
    """Announces to builders that this process will build their layers.

    A traced module then makes the weights of these layers at once, and no others.
    """
    for builder in builders:
        getattr(builder.build, "announce", lambda: None)()


@dataclass(frozen=True)
class LayerBuilder:
    """Describes how to make one layer, the smallest thing that a cut can separate.

        layers = [LayerBuilder("first", partial(nn.Linear, 2, 64)), LayerBuilder("last", partial(nn.Linear, 64, 2))]
        pipeline = Pipeline.of(layers, loss, (inputs, targets), cells=2, micro_batches=4)

    A worker calls ``build`` only for the layers of its own cells, so a list that describes 84 billion parameters is
    as cheap to hold as a small one. The built module maps a tensor, or tensors in tuples, lists and dicts, to
    such; floating-point tensors have gradients, integer and bool tensors are passed on as they are.

    Attributes:
        name: unique in the list and stable over time; parameters and checkpoints are keyed by it.
        build: makes the module, on the CPU, with freshly drawn weights. ``functools.partial`` of a class with plain
            values is the usual form: equal partials are measured once when costs are counted.
        cost: the paper's optional c_i, in any unit that is the same for all layers; None lets the engine count FLOPs.
        tied: parameters that are one with those of earlier layers, which may lie in other cells: own name, as
            ``weight``, to ``<layer>.<parameter>``, as ``embedding.weight``. Shape, type and requires_grad must be the
            same; what ``build`` draws for them is not used. Builders that return one module need not say it.
        frozen: names of parameters that do not learn, as with requires_grad=False.
    """

    name: str
    build: Callable[[], nn.Module]
    cost: float | None = None
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    frozen: tuple[str, ...] = ()

    def made(self) -> nn.Module:
        """Returns a new module, in which the parameters of ``frozen`` do not learn.

        Raises:
            ConfigurationError: ``build`` makes something else.
        """
        module = self.build()
        if isinstance(module, type) or not hasattr(module, "named_parameters"):
            raise ConfigurationError(f"layer {self.name!r}: build() makes a {type(module).__name__}, not a module")
        for name in self.frozen:
            module.get_parameter(name).requires_grad_(False)
        return module


def checked_layers(value: object, said: str) -> Sequence[LayerBuilder]:
    """Returns a value that is a list of layers with distinct names.

    Args:
        said: beginning of an error's message, which names the value: "model._target_=… must return".

    Raises:
        ConfigurationError: the value is no list of layers, or two layers have one name.
    """
    if not isinstance(value, Sequence) or not value or not all(isinstance(one, LayerBuilder) for one in value):
        raise ConfigurationError(
            f"{said} a list of LayerBuilder(name, build), where build() makes a module, but is a {type(value).__name__}"
        )
    for layer in value:
        is_module = hasattr(layer.build, "named_parameters") and not isinstance(layer.build, type)
        if is_module or not callable(layer.build):
            kind = type(layer.build).__name__
            raise ConfigurationError(
                f"LayerBuilder({layer.name!r}, build): build makes the module when it is called, as "
                f"functools.partial({kind}, …), but is a {kind}"
            )
    name, times = Counter(layer.name for layer in value).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(f"there are two layers named {name!r}: rename one")
    return value
