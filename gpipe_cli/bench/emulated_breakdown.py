"""One worker's part of table 4 on emulated accelerators: what each cell spends in each kind of computation."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.instruction import COMPUTE

from .emulator import ACCELERATOR
from .stopwatch import StopWatch
from .throughput import EmulatedModel


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: for each setting the mean seconds of a step, and of each cell by kind of computation.

    Args:
        config: ``repetitions``, ``realtime``, and ``settings`` as in `throughput.worker`; the first contender counts.
    """
    if config["realtime"]:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    context.init_process_group("gloo")
    rank, K = context.rank, context.world_size
    watch = StopWatch(rank, K, ACCELERATOR.reset)
    return [measure(setting, config["repetitions"], watch, rank, K) for setting in config["settings"]]


def measure(setting: dict[str, Any], repetitions: int, watch: StopWatch, rank: int, K: int) -> dict[str, Any]:
    model = EmulatedModel(setting["seconds"], setting["M"], setting["remat"])
    step = model.engine_step(setting["contenders"][0], setting["cuts"][str(K)], rank, K, None)
    ACCELERATOR.speed = 0.0
    watch.time(step)
    ACCELERATOR.speed = 1.0
    mine, whole = dict.fromkeys((op.name.lower() for op in COMPUTE), 0.0), 0.0
    for _ in range(repetitions):
        whole += watch.time(step) / repetitions
        for (op, _cell), seconds in step.engine.meter.seconds().items():
            if op in COMPUTE:
                mine[op.name.lower()] += seconds / repetitions
    cells: list[Any] = [None] * K
    dist.all_gather_object(cells, mine)
    return {"cells": cells, "step_seconds": whole}
