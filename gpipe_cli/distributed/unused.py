"""Finds the parameters that nothing used in a step: they have no gradient, and the optimizer leaves them alone.

A gradient of zero is another thing: weight decay and momentum would change the parameter. Sums over replicas and over
the uses of tied parameters need a gradient everywhere, so zeros stand in until the exchange has told what all know.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from torch import nn

from ..pipeline.gradients import fill_gradients


class UnusedParameters:
    """Knows which parameters this worker has used in a step, and those whose gradient of zero stands in for none.

    Args:
        own: this worker's parameters, by full name.

    Attributes:
        owners: names of the tied parameters that this worker's layers have used in the step, once for each use.
    """

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._own, self._filled = own, set[int]()
        self.owners: Sequence[str] = ()

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives trained parameters without a gradient one of zero until `clear`."""
        self._filled.update(map(id, fill_gradients(parameters)))

    def used(self) -> list[str]:
        """Returns the names of the parameters that this worker has used, one for each use."""
        return [*(n for n, p in self._own.items() if p.grad is not None and id(p) not in self._filled), *self.owners]

    def clear(self, everywhere: Callable[[], Container[str]]) -> None:
        """Takes the gradient of zero from the parameters that no worker has used.

        Args:
            everywhere: returns the names of those that some worker has used.
        """
        if self._filled:
            used = everywhere()
            for name, parameter in self._own.items():
                if id(parameter) in self._filled and name not in used:
                    parameter.grad = None
        self._filled, self.owners = set(), ()
