"""Copies a mini-batch to the device ahead of need, from pinned memory and on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..micro_batch import MicroBatch, Tensors


class Uploader:
    """Copies mini-batches to a GPU while it computes; on a CPU they stay where they are.

    Args:
        device: of the first worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, torch.get_device_module(device)
        self._stream: Any = None if device.type == "cpu" else self._kind.Stream(device)

    def begin(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Starts to copy and returns the copies, which may be used after `take`."""
        if self._stream is None:
            return list(micro_batches)
        with self._kind.stream(self._stream):
            return [(self._copied(inputs), self._copied(targets)) for inputs, targets in micro_batches]

    def take(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Makes the present stream wait for the copies; the host does not wait."""
        if self._stream is None:
            return
        present = self._kind.current_stream(self._device)
        present.wait_stream(self._stream)
        for tensor in (tensor for sides in micro_batches for side in sides for tensor in side):
            tensor.record_stream(present)  # the allocator must not give its memory away before the step has used it

    def _copied(self, tensors: Tensors) -> Tensors:
        # Memory of the host that is not pinned would make the host wait for the copy.
        return tuple(tensor.pin_memory().to(self._device, non_blocking=True) for tensor in tensors)
