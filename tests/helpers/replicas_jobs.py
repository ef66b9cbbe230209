"""Sums numbers over replicas, for test_gradients.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.gradients import sum_over_replicas

SIZES = (1, 2, 3, 7, 4096, 4099)


def sums(context: Context, config: dict[str, Any]) -> list[int]:
    """Entry point: returns the sizes whose sum has other bits than the sum in the order of the replicas."""
    context.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    wrong = []
    for size in SIZES:
        of_replica = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size())]
        summed = of_replica[world.rank()].clone()
        sum_over_replicas(summed, world)
        expected = of_replica[0].clone()
        for other in of_replica[1:]:
            expected += other
        if not torch.equal(summed, expected):
            wrong.append(size)
    return wrong
