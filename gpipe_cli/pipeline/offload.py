"""Keeps the state of cells elsewhere while they do not run, for models that are larger than the device's memory.

    state = CellState(StateFile(folder), cell's parameters)     # their values lie in the file now
    state.bring()                                               # the system begins to read
    ...                                                         # the cell runs; its weights are tensors as any others
    state.take_away()                                           # gradients move to the file; the memory is given back

On CPUs nothing is copied to and fro: weights, gradients, optimizer state and averages are tensors whose memory is a
file's, mapped. All that reads or writes them works as before, with the same bits. The system reads pages when they are
touched, keeps what room there is, and writes what has changed when it needs the memory. The file has no name: a kill
leaves nothing.

On a GPU the state lies in page-locked memory of the host (`HostMemory`, `HostState`), where the host updates it.
Weights are copied to the GPU while the cell before computes, gradients back while the next one does.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..cpu import return_freed_memory
from ..disk import DiskError
from ..errors import ConfigurationError
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
        store: the worker's file, or its memory of the host.
        parameters: the cell's own parameters; tied ones that other cells own stay in memory.
    """

    def __init__(self, store: "StateFile | HostMemory", parameters: Sequence[nn.Parameter]) -> None:
        self._store, self._parameters = store, parameters
        self._memory: list[mmap.mmap] = []  # weights first
        self._held: set[int] = set()  # addresses of tensors in the file
        for parameter, moved in zip(parameters, self.moved(parameters), strict=True):
            parameter.data = moved

    def moved(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns copies in the file, with the same strides. Copies of tensors that are not dense stay out of it."""
        tensors = [tensor.detach() for tensor in tensors]
        # Where each tensor starts in the memory, all sizes rounded up; the last number is the size of the memory.
        starts = [*accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0)]
        memory, copies = self._store.mapped(starts[-1]), []
        for tensor, start in zip(tensors, starts, strict=False):
            if not (tensor.nbytes and _is_dense(tensor)):
                copies.append(tensor.clone())
                continue
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copies.append(flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor))
            self._held.add(copies[-1].data_ptr())
        self._memory.append(memory)
        return copies

    @cached_property
    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Returns where the gradient of each parameter is kept; made when the first is."""
        return dict(zip(self._parameters, self.moved(self._parameters), strict=True))

    def averages(self, averages: list[Tensor]) -> list[Tensor]:
        """Returns moving averages of the cell's tensors where they are kept: in the file."""
        return self.moved(averages)

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

    def synchronize(self) -> None:
        """Waits until the host may read the gradients."""

    def bring(self) -> None:
        """Lets the system read the weights ahead, and returns at once. Optimizer state is read when it is used."""
        self._memory[0].madvise(mmap.MADV_WILLNEED)

    def take_away(self) -> None:
        """Moves gradients to the file, and gives the process's memory back; the system writes when it needs to."""
        new = [p for p in self._parameters if p.grad is not None and p.grad.data_ptr() not in self._held]
        for parameter in new:
            place, gradient = self._gradients[parameter], parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.stride() == place.stride():
                parameter.grad = place.copy_(gradient)
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)
        return_freed_memory()


class HostMemory:
    """Gives the state of a worker's cells page-locked memory of the host, and copies by a stream of its own.

    Attributes:
        device: the GPU on which the cells run.
        on_device: numbers of the cells whose weights are on the GPU, or on their way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_device = device, set[int]()
        self._kind = torch.get_device_module(device)
        self._copies = self._kind.Stream(device)

    def mapped(self, size: int) -> mmap.mmap:
        """Returns so many bytes of memory, rounded up to whole pages. (torch's own allocator takes a power of two.)

        Raises:
            ConfigurationError: the system cannot lock so much.
        """
        memory = mmap.mmap(-1, -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self.device.type == "cuda":
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own
            if error := int(runtime.cudaHostRegister(address, len(memory), 0)):
                raise ConfigurationError(
                    f"pipeline.offload=true: the host cannot lock {len(memory) / 1e9:.1f} GB more of its memory for "
                    f"weights or gradients of a cell (CUDA error {error}): see `ulimit -l`, or use more machines"
                )
        return memory

    def wait(self) -> None:
        """Lets what the GPU computes from now on wait for the copies that have begun."""
        self._kind.current_stream(self.device).wait_stream(self._copies)

    def synchronize(self) -> None:
        """Waits until all copies are made, so that the host may read gradients."""
        self._copies.synchronize()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begins to copy tensors behind all that the GPU has been given to do, beside what comes later.

        Args:
            pairs: (to, from) of each copy.
        """
        self._copies.wait_stream(self._kind.current_stream(self.device))
        with self._kind.stream(self._copies):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                if source.device == self.device:
                    source.record_stream(self._copies)  # its memory is not used anew before the copy is made


class HostState(CellState):
    """Holds the state of one cell in the host's memory, and its weights on the GPU while it runs.

    Args:
        memory: memory of the worker.
        parameters: the cell's own parameters that are not tied; tied ones stay on the GPU.
        number: number of the cell.
    """

    def __init__(self, memory: HostMemory, parameters: Sequence[nn.Parameter], number: int) -> None:
        super().__init__(memory, parameters)
        self.memory, self._number = memory, number
        self._at_home: list[Tensor] = []  # the weights in the host's memory, while the parameters are on the GPU

    def averages(self, averages: list[Tensor]) -> list[Tensor]:
        """Returns moving averages where they are kept: beside what they average."""
        return averages

    def keep(self, state: dict[Any, dict[str, Any]]) -> None:
        """Leaves the optimizer's state where the update makes it: in the host's memory."""

    def synchronize(self) -> None:
        """Waits until the gradients of all cells have arrived."""
        self.memory.synchronize()

    def bring(self) -> None:
        """Begins to copy the weights to the GPU, behind the computations of the cell before the present one."""
        self._at_home = [parameter.data for parameter in self._parameters]
        copies = [torch.empty_like(weights, device=self.memory.device) for weights in self._at_home]
        self.memory.wait()  # for the cell that runs now
        self.memory.copy(zip(copies, self._at_home, strict=True))
        if not self.memory.on_device:
            self.memory.wait()  # nothing runs meanwhile: the cell's own computations are next
        self.memory.on_device.add(self._number)
        for parameter, weights in zip(self._parameters, copies, strict=True):
            parameter.data = weights

    def take_away(self) -> None:
        """Frees the weights on the GPU, and begins to copy gradients to the host."""
        if self._number not in self.memory.on_device:
            return
        self.memory.wait()  # for the next cell
        self.memory.on_device.remove(self._number)
        new = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        for parameter, weights in zip(self._parameters, self._at_home, strict=True):
            parameter.grad, parameter.data = None, weights
        self.memory.copy((self._gradients[parameter], gradient) for parameter, gradient in new.items())
        for parameter in new:
            parameter.grad = self._gradients[parameter]


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the tensor's elements fill its memory, in some order of its dimensions."""
    dimensions = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return all(stride == prod(size for _, size in dimensions[:number]) for number, (stride, _) in enumerate(dimensions))
