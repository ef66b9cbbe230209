"""What an optimizer keeps for each parameter, found by taking one step with the optimizer itself, without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...partition.cost import TensorShape, fake_mode
from .tracking import storage_key

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
_SMALL = 2  # side of the parameters with which an optimizer is tried that refuses fake tensors


class OptimizerState:
    """Bytes of optimizer state, for one way to make an optimizer.

    Args:
        make: the optimizer over some parameters.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self.bytes_of = cache(self._bytes_of)

    def total(self, parameters: Iterable[TensorShape]) -> int:
        """Over all these parameters."""
        return sum(self.bytes_of(shape) for shape in parameters)

    def _bytes_of(self, shape: TensorShape) -> int:
        try:
            with fake_mode():
                return _state_bytes(self._make, torch.empty(shape.shape, dtype=shape.dtype))
        except Exception:
            # An optimizer that looks at values: its state on a small parameter tells how much there is per number.
            small = torch.zeros([min(size, _SMALL) for size in shape.shape], dtype=shape.dtype)
            state = _state_bytes(self._make, small)
            return round(state / max(1, small.numel()) * shape.numel)


def _state_bytes(make: MakeOptimizer, weight: Tensor) -> int:
    parameter = nn.Parameter(weight)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    try:
        optimizer.step()
    except Exception:
        if not any(optimizer.state.values()):  # some look at values only after they have made their state
            raise
    storages = {
        storage_key(value): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())
