"""Makes a process group of torch.distributed from the `Messenger` of a worker.

gloo would listen on a TCP port in every process, and could not tell who connects. Here nothing listens.
"""

# torch calls an overridden method in one of the ways that its own has.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.launch.messenger import LOCAL, Address, Messenger

_COLLECTIVE = -1  # tag, beside those of point-to-point messages, which are not negative


def register_local_backend(messenger: Messenger) -> None:
    """Makes ``backend="local"`` of `init_process_group` and `new_group` a `LocalGroup` over this messenger."""

    def create(options: Any, _: object) -> LocalGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)  # the default group names none
        channel = zlib.crc32(options.group_id.encode())
        return LocalGroup(messenger, options.group_rank, list(ranks), channel, options.timeout.total_seconds())

    dist.Backend.register_backend(LOCAL, create, extended_api=True, devices=["cpu"])


class LocalGroup(dist.ProcessGroup):
    """Sends CPU tensors between workers of one machine.

    Sums are added up in the order of the ranks, so all workers get the same bits.

    Args:
        rank: number of this worker in the group.
        ranks: numbers in the job of the group's workers, in their order.
        channel: a number that no other group has.
        seconds: the longest wait for another worker.
    """

    supports_splitting = False

    def __init__(self, messenger: Messenger, rank: int, ranks: Sequence[int], channel: int, seconds: float) -> None:
        # Stubs of torch before 2.15 lack this constructor.
        super().__init__(rank, len(ranks))  # type: ignore[call-arg, unused-ignore]
        self._messenger, self._rank, self._ranks, self._channel = messenger, rank, ranks, channel
        self._seconds = seconds

    def getBackendName(self) -> str:
        return LOCAL

    def _get_backend(self, device: torch.device) -> LocalGroup:
        """Returns this group, whatever the device: torch asks every new group of a job that is bound to GPUs."""
        return self

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        self._give(tensors[0], rank, tag)
        return _Done()

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return _Receive(self._messenger, self._address(rank, tag), tensors[0], self._seconds)

    def connect(self, rank: int, number: int) -> socket.socket:
        """Returns a socket connected to a worker of the group, which gets the other end by `accept`."""
        return self._messenger.connect(self._ranks[rank], number, self._seconds)

    def accept(self, rank: int, number: int) -> socket.socket:
        """Returns a socket that a worker of the group has connected with this number; waits for it."""
        return self._messenger.accept(self._ranks[rank], number, self._seconds)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        root, (tensor,) = options.rootRank, tensors
        if self._rank == root:
            for rank in range(len(self._ranks)):
                if rank != root:
                    self._give(tensor, rank, _COLLECTIVE)
        else:
            self._take(tensor, root, _COLLECTIVE)
        return _Done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        (tensor,), wanted = tensors, dist.ReduceOp.SUM if options is None else options.reduceOp
        if wanted != dist.ReduceOp.SUM:
            raise ValueError(f"a process group of one machine adds up (ReduceOp.SUM), and knows no {wanted}")
        total, *others = self._from_all(tensor)
        for other in others:
            total = total + other
        tensor.copy_(total)
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> dist.Work:
        for place, tensor in zip(outputs[0], self._from_all(tensors[0]), strict=True):
            place.copy_(tensor)
        return _Done()

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        self._swap([tensor] * len(self._ranks), output.view(-1).chunk(len(self._ranks)))
        return _Done()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int], options: Any = None
    ) -> dist.Work:
        self._swap(self._divided(tensor, sizes), self._divided(output, output_sizes))
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        self._from_all(torch.zeros(1))
        return _Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single  # their names in earlier releases of torch

    def _divided(self, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """Returns the part of a tensor for each worker; without sizes the parts are equal."""
        return torch.split(tensor, sizes) if sizes else tensor.chunk(len(self._ranks))

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensor of every worker, in the order of the ranks."""
        everyone = [torch.empty_like(tensor) for _ in self._ranks]
        self._swap([tensor] * len(self._ranks), everyone)
        return everyone

    def _swap(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> None:
        """Sends ``give[r]`` to each worker r, and receives ``take[r]`` from it.

        In each round a worker sends to one other and receives from one, so that few messages are on their way.
        """
        size = len(self._ranks)
        take[self._rank].copy_(give[self._rank].view_as(take[self._rank]))
        for distance in range(1, size):
            to, from_ = (self._rank + distance) % size, (self._rank - distance) % size
            self._give(give[to], to, _COLLECTIVE)
            self._take(take[from_], from_, _COLLECTIVE)

    def _give(self, tensor: Tensor, rank: int, tag: int) -> None:
        self._messenger.send(self._address(rank, tag), _bytes_of(tensor), self._seconds)

    def _take(self, tensor: Tensor, rank: int, tag: int) -> None:
        self._messenger.receive(self._address(rank, tag), _bytes_of(tensor), self._seconds)

    def _address(self, rank: int, tag: int) -> Address:
        return Address(self._ranks[rank], self._channel, tag)


class _Done(dist.Work):
    """Answers for an operation that was complete when it returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Receive(dist.Work):
    """Receives a message into a tensor, at the first `wait`."""

    def __init__(self, messenger: Messenger, address: Address, tensor: Tensor, seconds: float) -> None:
        super().__init__()
        self._messenger, self._address, self._tensor, self._seconds = messenger, address, tensor, seconds
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:
            seconds = timeout.total_seconds() if timeout else self._seconds
            self._messenger.receive(self._address, _bytes_of(self._tensor), seconds)
            self._is_done = True
        return True


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor; torch raises an error for others."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
