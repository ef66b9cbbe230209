"""Sums tensors over the D replicas of a pipeline; the bits depend on neither K nor the number of workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_replicas(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``flat`` by the sum of all replicas' ``flat``; see `begin_sum`."""
    begin_sum(flat, group)()


def begin_sum(flat: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Starts to replace ``flat`` by the sum of all replicas' ``flat``, added up in the order of the replicas.

    An all-reduce around a ring starts each chunk of the tensor at another replica, so the order in which a number is
    added up would depend on its place in the tensor, and so on the cut. (With two replicas the order does not matter.)
    Here every replica adds up one chunk and all of them gather the chunks: as many bytes as around a ring.

    Args:
        flat: one-dimensional and contiguous; of the same size on all replicas.

    Returns:
        A function that waits until the sum is there; all replicas call it at the same place.
    """
    wired = on_wire(flat, group)
    if wired is not flat:
        finish_wired = begin_sum(wired, group)

        def copy_back() -> None:
            finish_wired()
            flat.copy_(wired)

        return copy_back
    replicas = group.size()
    if replicas <= 2:
        return _waiting(dist.all_reduce(flat, group=group, async_op=True))
    share = -(-flat.numel() // replicas)
    padded = torch.cat([flat, flat.new_zeros(share * replicas - flat.numel())])
    mine = torch.empty_like(padded)
    arrived = _waiting(dist.all_to_all_single(mine, padded, group=group, async_op=True))

    def finish() -> None:
        arrived()
        first, *others = mine.view(replicas, share)
        for other in others:
            first.add_(other)
        dist.all_gather_into_tensor(padded, first, group=group)
        flat.copy_(padded[: flat.numel()])

    return finish


def copy_from_replica(tensor: Tensor, replica: int, group: dist.ProcessGroup) -> None:
    """Replaces a contiguous ``tensor`` by that of one replica; all of them call it at the same time."""
    wired = on_wire(tensor, group)
    dist.broadcast(wired, group_src=replica, group=group)
    if wired is not tensor:
        tensor.copy_(wired)


def on_wire(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensor or a contiguous copy on the device of the group's messages."""
    return tensor.to(wire_device(group)).contiguous()


def wire_device(group: dist.ProcessGroup) -> str:
    """Returns the device of the group's messages: NCCL sends from GPUs, others from the CPU."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _waiting(work: dist.Work | None) -> Callable[[], None]:
    assert work is not None  # this rank is in the group

    def wait() -> None:
        work.wait()

    return wait
