"""Keeps the state of cells in files that are mapped into memory, for models that are larger than the memory (CPUs).

    state = CellState(StateFile(folder), cell's parameters)     # their values lie in the file now
    state.bring()                                               # the system begins to read
    ...                                                         # the cell runs; its weights are tensors as any others
    state.take_away()                                           # gradients move to the file; the memory is given back

Nothing is copied to and fro: weights, gradients, optimizer state and averages are tensors whose memory is the file's.
All that reads or writes them works as before, with the same bits. The system reads pages when they are touched, keeps
what room there is, and writes what has changed when it needs the memory. The file has no name: a kill leaves nothing.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..cpu import return_freed_memory
from ..disk import DiskError
from .messages.boundary import ALIGNMENT

LEAST_BYTES = 1024  # smaller tensors, as counters of steps, stay in memory


class StateFile:
    """Holds the state of all cells of a worker, on disk.

    Args:
        folder: folder of the file, on a file system with room for it.

    Raises:
        DiskError: no file can be made there.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._size = folder, 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="gpipe-offload-")  # noqa: SIM115 (as long as the run)
        except OSError as error:
            raise DiskError(f"pipeline.offload_dir={folder}: {error.strerror}") from error

    def mapped(self, size: int) -> mmap.mmap:
        """Makes the file longer and returns the new part as memory.

        Args:
            size: least bytes of it; whole pages are returned.

        Raises:
            DiskError: the disk has no room for them.
        """
        size = -(-max(size, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._size, size)
            memory = mmap.mmap(self._file.fileno(), size, offset=self._size)
        except OSError as error:
            raise DiskError(
                f"pipeline.offload_dir={self._folder}: {error.strerror}, with {(self._size + size) / 1e9:.1f} GB of "
                "weights, gradients and optimizer state; free disk space, or name another folder"
            ) from error
        self._size += size
        return memory


class CellState:
    """Holds the state of one cell.

    Args:
        file: file of the worker.
        parameters: the cell's own parameters; tied ones that other cells own stay in memory.
    """

    def __init__(self, file: StateFile, parameters: Sequence[nn.Parameter]) -> None:
        self._file, self._parameters = file, parameters
        self._memory: list[mmap.mmap] = []  # weights first
        self._held: set[int] = set()  # addresses of tensors in the file
        self._gradients: dict[nn.Parameter, Tensor] = {}
        for parameter, moved in zip(parameters, self.moved(parameters), strict=True):
            parameter.data = moved

    def moved(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns copies in the file, with the same strides. Copies of tensors that are not dense stay out of it."""
        tensors = [tensor.detach() for tensor in tensors]
        starts = [*accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0)]
        memory, copies = self._file.mapped(starts[-1]), []
        for tensor, start in zip(tensors, starts, strict=False):
            if not (tensor.nbytes and _is_dense(tensor)):
                copies.append(tensor.clone())
                continue
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copies.append(flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor))
            self._held.add(copies[-1].data_ptr())
        self._memory.append(memory)
        return copies

    def keep(self, state: dict[Any, dict[str, Any]]) -> None:
        """Moves the optimizer's state of the cell's parameters to the file, unless it is there.

        Args:
            state: the state of all parameters, which is changed in place.
        """
        places = [
            (state[parameter], key)
            for parameter in self._parameters
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.nbytes >= LEAST_BYTES and value.data_ptr() not in self._held
        ]
        if places:
            for (values, key), moved in zip(places, self.moved(values[key] for values, key in places), strict=True):
                values[key] = moved

    def bring(self) -> None:
        """Lets the system read the weights ahead, and returns at once. Optimizer state is read when it is used."""
        self._memory[0].madvise(mmap.MADV_WILLNEED)

    def take_away(self) -> None:
        """Moves gradients to the file, and gives the process's memory back; the system writes when it needs to."""
        new = [p for p in self._parameters if p.grad is not None and p.grad.data_ptr() not in self._held]
        if new and not self._gradients:
            self._gradients = dict(zip(self._parameters, self.moved(self._parameters), strict=True))
        for parameter in new:
            place, gradient = self._gradients[parameter], parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.stride() == place.stride():
                parameter.grad = place.copy_(gradient)
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)
        return_freed_memory()


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the tensor's elements fill its memory, in some order of its dimensions."""
    dimensions = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return all(stride == prod(size for _, size in dimensions[:number]) for number, (stride, _) in enumerate(dimensions))
