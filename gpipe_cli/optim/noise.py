"""Updates weights with the same random numbers for every cut, where an optimizer draws some, as Langevin dynamics do.

Such an optimizer updates one parameter after the other, each under a seed of its own; others update all at once.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..pipeline.randomness import NoiseSource


class SeededUpdates:
    """Takes the steps of an optimizer.

    Args:
        names: of this worker's parameters, in the whole model.
        noise: seeds and restores the generators.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], noise: NoiseSource) -> None:
        self._optimizer, self._names, self._noise = optimizer, names, noise
        self._draws = self._tried()

    def step(self, update: int) -> None:
        """Takes a step, number ``update`` from 0."""
        with self._noise.restored():
            if self._draws:
                self._one_by_one(update)
            else:
                self._optimizer.step()

    def _one_by_one(self, update: int) -> None:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        for number, given in enumerate(before):
            for parameter in given["params"]:
                for other, (group, values) in enumerate(zip(groups, before, strict=True)):
                    group.clear()  # what it counts, each parameter counts anew
                    group.update(values, params=[parameter] if other == number else [])
                self._noise.seed(self._noise.update_seed(update, self._names[parameter]))
                self._optimizer.step()
        for group, given in zip(groups, before, strict=True):
            group["params"] = given["params"]

    def _tried(self) -> bool:
        """Returns whether the optimizer draws random numbers, tried on small parameters made for it."""
        groups = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"][:1]:
                alone = nn.Parameter(parameter.detach().new_ones([min(size, 2) for size in parameter.shape]))
                alone.grad = torch.ones_like(alone)
                groups.append({**group, "params": [alone]})
        trial: Any = object.__new__(type(self._optimizer))
        trial.__dict__ = {**vars(self._optimizer), "param_groups": groups, "state": defaultdict(dict)}
        with self._noise.restored(), suppress(Exception):  # it needs a closure, perhaps
            before = self._noise.states()
            type(self._optimizer).step(trial)
            return any(not torch.equal(*pair) for pair in zip(before, self._noise.states(), strict=True))
        return False
