"""Weights that several layers hold, such as a table for both embedding and softmax: known before a run begins.

They have one gradient and get one update, so they lie in one cell, and count there once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layers import LayerBuilder
from .cost import build_key, build_without_memory, fake_mode


@dataclass(frozen=True)
class SharedParameter:
    """One parameter that two layers hold; each would train its own copy if a cut came between them.

    Attributes:
        layers: the names of the two, in the model's order.
        parameters: what each of them calls it.
    """

    layers: tuple[str, str]
    parameters: tuple[str, str]


@dataclass(frozen=True)
class Sharing:
    """What the layers of a model share.

    Attributes:
        pairs: each such parameter with its first holder and another one; of equal builders the first two.
        repeated: for every layer the parameters that an earlier one holds too: how many numbers each has, by its name
            within the layer.
    """

    pairs: list[SharedParameter]
    repeated: list[Mapping[str, int]]


def find_sharing(builders: Sequence[LayerBuilder]) -> Sharing:
    """Parameters that stand in several layers, such as those of one module that two builders return.

    Raises:
        CostError: a layer that cannot be built.
    """
    # Weak: what two builders share is kept alive by them, and everything else is let go at once.
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
