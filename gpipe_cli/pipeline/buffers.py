"""Refuses layers that change their buffers or weights in a training forward.

The forward of a micro-batch may run twice, the second time for its backward, and micro-batches pass one after another:
results of a layer that changes its buffers would depend on K, on re-materialization and on the schedule. Only
BatchNorm's statistics may change, when a step ends (`batchnorm.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..gpus import GPU
from .batchnorm import DeferredBatchNorm
from .messages.boundary import as_tensors, replace_tensors

LEAF_CHANGED = "leaf Variable that requires grad is being used in an in-place operation"
INPUT_CHANGED = "its input in place", "use inplace=False there, or a copy (x.clone())"


class BufferChanged(ConfigurationError):
    """Raised when a layer changes a buffer, a weight or its input in a training forward; names it and the way out."""


class BufferGuard:
    """Calls a layer and compares its buffers, its weights and its input before and after.

    A change of the input in place is refused wherever the layer stands. At the start of a cell the input is kept for
    re-materialization, and where cells start depends on K.

    If a buffer has changed, the layer is called once more, on a copy of its input. A buffer that is made at first use,
    such as a table of positions, does not change again, and is allowed.

    Args:
        name: the layer's name, for the message.
        module: the layer.
        forward: calls the layer without the guard.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._module, self._forward = name, module, forward

    def __call__(self, argument: Any) -> Any:
        """Returns the layer's outputs.

        Raises:
            BufferChanged: a buffer, a weight or the input has changed.
        """
        inputs = as_tensors(argument)
        versions = [tensor._version for tensor in inputs]
        weights = {name: weight._version for name, weight in self._module.named_parameters()}
        try:
            outputs, changed = self._changes(argument, self._forward)
        except RuntimeError as error:
            if LEAF_CHANGED in str(error):  # autograd's own answer at the start of a cell
                raise self._refusal(*INPUT_CHANGED) from error
            raise
        if [tensor._version for tensor in inputs] != versions:
            raise self._refusal(*INPUT_CHANGED)
        for name, weight in self._module.named_parameters():
            if weight._version != weights.get(name, weight._version):
                way = "as nn.Embedding(max_norm=...) does; only the optimizer may"
                raise self._refusal(f"its parameter {name!r} in forward", way)
        if changed:
            _, changed = self._changes(argument, self._once_more)
        if changed:
            way = (
                "use nn.BatchNorm, whose statistics the engine keeps, a layer without running statistics, or begin_step"
            )
            raise self._refusal(f"its buffer {changed!r} in every training forward", way)
        return outputs

    def _refusal(self, what: str, way: str) -> BufferChanged:
        """Returns the error that says ``what`` the layer changes, and the ``way`` out."""
        return BufferChanged(
            f"layer {self._name!r} changes {what}: {way} (docs/your-own-model.md). A micro-batch may go forward twice, "
            "so results would depend on pipeline.K and pipeline.remat"
        )

    def _changes(self, argument: Any, call: Callable[[Any], Any]) -> tuple[Any, str | None]:
        """Returns the result of ``call``, and the name of the first buffer that it replaces or changes; None: none."""
        # A version is not enough: batch_norm's kernels do not count it up.
        before = {name: (b, b._version, b.detach().clone()) for name, b in self._module.named_buffers()}
        outputs = call(argument)
        after = dict(self._module.named_buffers())
        for name in {**before, **after}:
            if name not in before or name not in after or not _is_same(after[name], *before[name]):
                return outputs, name
        return outputs, None

    def _once_more(self, argument: Any) -> None:
        """Calls the layer without effect on the input, on later random numbers and on BatchNorm's statistics."""
        gathering = [m for m in self._module.modules() if isinstance(m, DeferredBatchNorm) and m.gathering]
        copies = replace_tensors(argument, lambda tensor: tensor.detach().clone())
        for batchnorm in gathering:
            batchnorm.gathering = False
        devices = {tensor.device for tensor in as_tensors(argument)}
        try:
            with torch.random.fork_rng([device for device in devices if device.type == GPU]):
                self._forward(copies)
        finally:
            for batchnorm in gathering:
                batchnorm.gathering = True


def _is_same(buffer: Tensor, before: Tensor, version: int, copy: Tensor) -> bool:
    """Returns whether a buffer is the tensor that it was, with the same bits."""
    if buffer is not before or buffer._version != version:
        return False
    return buffer.layout is not torch.strided or torch.equal(_bits(buffer), _bits(copy))


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bytes, so that NaN equals NaN."""
    return tensor.detach().reshape(-1).view(torch.uint8)
