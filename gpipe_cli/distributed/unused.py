"""Finds the parameters that nothing used in a step: they have no gradient, and the optimizer leaves them alone.

A gradient of zero is another thing: weight decay and momentum would change the parameter. Sums over replicas and over
the uses of tied parameters need a gradient everywhere, so zeros stand in until the exchange has told what all know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..pipeline.gradients import fill_gradients
from .exchange import Exchange

_BITS = 52  # of a float64 that add up exactly


class UnusedParameters:
    """Counts the workers that have used each parameter, by a digit for each in the exchange.

    Args:
        places: of all parameters of the model, by full name.
        own: this worker's parameters, by full name.
        most: uses of a parameter over all workers.

    Attributes:
        owners: names of the tied parameters that this worker's layers have used in the step, once for each use.
    """

    def __init__(self, places: Mapping[str, int], own: Mapping[str, nn.Parameter], most: int) -> None:
        self._places, self._own, self._base = places, own, most + 1
        self._digits = int(_BITS / math.log2(self._base))  # in one number
        self._filled: set[int] = set()
        self.owners: Sequence[str] = ()

    def fields(self) -> dict[str, int]:
        """Returns the exchange's field."""
        return {"used": -(-len(self._places) // self._digits)}

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives trained parameters without a gradient one of zero until `clear`."""
        self._filled.update(map(id, fill_gradients(parameters)))

    def write(self, exchange: Exchange) -> None:
        """Writes which parameters this worker has used."""
        used = [name for name, p in self._own.items() if p.grad is not None and id(p) not in self._filled]
        counts = [0.0] * (exchange.own["used"].numel() * self._digits)
        for name in (*used, *self.owners):
            counts[self._places[name]] += 1
        exchange.own["used"][:] = torch.tensor(counts, dtype=torch.float64).view(-1, self._digits) @ self._powers

    def clear(self, exchange: Exchange) -> None:
        """Takes the gradient of zero from the parameters that no worker has used in the step of the last exchange."""
        if self._filled:
            numbers = exchange.total["used"].long()[:, None]
            digits = (numbers // self._powers.long() % self._base).flatten()
            for name, parameter in self._own.items():
                if id(parameter) in self._filled and not digits[self._places[name]]:
                    parameter.grad = None
        self._filled, self.owners = set(), ()

    @property
    def _powers(self) -> torch.Tensor:
        return torch.tensor([self._base**digit for digit in range(self._digits)], dtype=torch.float64)
