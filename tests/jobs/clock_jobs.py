"""Worker entry points for test_trace.py: two machines' clocks, made of one."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpipe_cli.distributed.clocks import clock_offset
from gpipe_cli.distributed.world import join_world
from gpipe_cli.launch.context import Context

AHEAD = 1000.0  # seconds by which the clock of every rank is before the one of the rank below


def offsets(context: Context, config: dict[str, Any]) -> list[float]:
    """What each rank finds, when each is a machine of its own, and after that when all are one."""
    world = join_world(context, context.world_size, 1, "cpu", "auto")

    def clock() -> float:
        return time.perf_counter() + AHEAD * world.rank

    torch.set_num_threads(1)
    apart = clock_offset(world, f"machine {world.rank}", clock)
    together = clock_offset(world, "the machine", clock)
    found = [float(str(value)) for value in world.gather_everyone(apart)]
    return [*found, together]
