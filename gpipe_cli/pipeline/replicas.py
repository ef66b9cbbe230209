"""Sums over the D replicas of a pipeline, whose bits depend on neither K nor the number of workers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_replicas(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Puts the sum of all replicas' ``flat`` in its place, added up in the order of the replicas.

    An all-reduce around a ring begins each part of what it is given at another replica. So which order a number is
    added up in would depend on where it lies, which the cut decides; of two numbers the order makes no difference.
    Here every replica adds up a part of its own and all of them gather the parts: as many bytes as around a ring.

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
