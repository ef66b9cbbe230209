"""Holds operations that stand in traced graphs beside torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
BATCH_NORM = torch.ops.aten.batch_norm.default
CUMULATIVE = -1.0  # stands for a BatchNorm's momentum of None, which its code would turn into a value of a tensor
LSTM = torch.ops.aten.lstm.input


def enter_autocast(*arguments: Any) -> Any:
    """Enters the autocast that a module's code asks for; returns it for `leave_autocast`."""
    context = torch.autocast(*arguments)
    context.__enter__()  # type: ignore[no-untyped-call]  # torch's own
    return context


def leave_autocast(context: Any) -> None:
    """Leaves the autocast that `enter_autocast` entered."""
    context.__exit__(None, None, None)


def attention_with_trained_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any, **more: Any
) -> Any:
    """Returns attention whose mask has a gradient, by the same kernel whether gradients are wanted or not.

    torch chooses the kernel by whether the mask requires a gradient, and re-materialization runs forward without.
    """
    if torch.is_grad_enabled():
        return ATTENTION(query, key, value, mask, *rest, **more)
    with torch.enable_grad():
        return ATTENTION(query, key, value, mask.detach().requires_grad_(), *rest, **more).detach()


def lstm_with_graph(*arguments: Any) -> tuple[Tensor, ...]:
    """Returns an LSTM's outputs, by the same kernel whether gradients are wanted or not; oneDNN has two."""
    if torch.is_grad_enabled():
        return tuple(LSTM(*arguments))
    with torch.enable_grad():
        return tuple(output.detach() for output in LSTM(*arguments))
