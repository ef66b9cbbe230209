"""Finds weights that several layers share, such as a table for both embedding and softmax, before a run begins.

They have one gradient and one update, so they must lie in one cell, and count there once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layers import LayerBuilder
from .fake_layers import build_key, build_without_memory, fake_mode


@dataclass(frozen=True)
class SharedParameter:
    """Describes a parameter that two layers hold; with a cut between them each would train its own copy.

    Attributes:
        layers: the names of the two, in the model's order.
        parameters: its name in each of them.
    """

    layers: tuple[str, str]
    parameters: tuple[str, str]


@dataclass(frozen=True)
class Sharing:
    """Describes the parameters that layers of a model share.

    Attributes:
        pairs: each such parameter with the first layer that holds it and another one; of equal builders the first two.
        repeated: for every layer, the sizes of the parameters that an earlier layer holds too, by their name within
            the layer.
    """

    pairs: list[SharedParameter]
    repeated: list[Mapping[str, int]]


def find_sharing(builders: Sequence[LayerBuilder]) -> Sharing:
    """Finds parameters that stand in several layers, such as those of one module that two builders return.

    Raises:
        CostError: a layer cannot be built.
    """
    # Weak references: the builders keep alive what they share, and everything else is freed at once.
    holders: dict[int, tuple[weakref.ref[nn.Parameter], str, str]] = {}
    of_equal: dict[Hashable, list[Mapping[str, int]]] = {}
    sharing = Sharing([], [])
    with torch.random.fork_rng(devices=[]):
        for index, builder in enumerate(builders):
            known = of_equal.setdefault(build_key(builder, index), [])
            if len(known) < 2:  # a third of equal layers repeats what the second did
                repeated = {}
                for name, parameter in build_without_memory(builder, fake_mode()).named_parameters():
                    holder, layer, its_name = holders.get(id(parameter), (None, "", ""))
                    if holder is not None and holder() is parameter:
                        sharing.pairs.append(SharedParameter((layer, builder.name), (its_name, name)))
                        repeated[name] = parameter.numel()
                    else:
                        holders[id(parameter)] = (weakref.ref(parameter), builder.name, name)
                known.append(repeated)
            sharing.repeated.append(known[-1])
    return sharing
