"""Finds the bytes that an optimizer keeps for a parameter, by taking one step with it without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..partition.fake_layers import TensorShape, fake_mode

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
_SMALL = 2  # side of the real parameter that replaces a fake one where the optimizer looks at values


def optimizer_state_bytes(make: MakeOptimizer, shape: TensorShape) -> int:
    """Returns the bytes of state that an optimizer keeps for one parameter.

    Args:
        make: makes the optimizer for some parameters.
        shape: of the parameter.
    """
    try:
        with fake_mode():
            return _state_bytes(make, torch.empty(shape.shape, dtype=shape.dtype))
    except Exception:  # the optimizer looks at values: scale up its state for a small parameter
        small = torch.zeros([min(size, _SMALL) for size in shape.shape], dtype=shape.dtype)
        return round(_state_bytes(make, small) / max(1, small.numel()) * shape.numel)


def _state_bytes(make: MakeOptimizer, weight: Tensor) -> int:
    parameter = nn.Parameter(weight)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    try:
        optimizer.step()
    except Exception:
        if not any(optimizer.state.values()):  # some optimizers look at values only after they have made their state
            raise
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())
