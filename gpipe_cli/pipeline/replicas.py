"""Sums tensors over the D replicas of a pipeline; the bits depend on neither K nor the number of workers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_replicas(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``flat`` by the sum of all replicas' ``flat``, added up in the order of the replicas.

    An all-reduce around a ring starts each chunk of the tensor at another replica, so the order in which a number is
    added up would depend on its place in the tensor, and so on the cut. (With two replicas the order does not matter.)
    Here every replica adds up one chunk and all of them gather the chunks: as many bytes as around a ring.

    Args:
        flat: one-dimensional and contiguous; of the same size on all replicas.
    """
    replicas = group.size()
    if replicas <= 2:
        dist.all_reduce(flat, group=group)
        return
    share = -(-flat.numel() // replicas)
    padded = torch.cat([flat, flat.new_zeros(share * replicas - flat.numel())])
    mine = torch.empty_like(padded)
    dist.all_to_all_single(mine, padded, group=group)
    first, *others = mine.view(replicas, share)
    for other in others:
        first += other
    dist.all_gather_into_tensor(padded, first, group=group)
    flat.copy_(padded[: flat.numel()])
