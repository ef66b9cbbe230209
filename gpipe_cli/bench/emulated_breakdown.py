"""One worker's part of table 4 on emulated accelerators: what each cell spends in each kind of computation."""

from __future__ import annotations

from typing import Any

from gpipe_cli.launch.context import Context
from gpipe_cli.schedule.instruction import COMPUTE

from .stopwatch import StopWatch
from .throughput import EmulatedModel
from .turns import join_emulation, of_all_workers, warm_up


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: for each setting the mean seconds of a step, and of each cell by kind of computation.

    Args:
        config: ``repetitions``, ``realtime``, and ``settings`` as in `throughput.worker`; the first contender counts.
    """
    watch = join_emulation(context, config["realtime"])
    rank, K = context.rank, context.world_size
    return [measure(setting, config["repetitions"], watch, rank, K) for setting in config["settings"]]


def measure(setting: dict[str, Any], repetitions: int, watch: StopWatch, rank: int, K: int) -> dict[str, Any]:
    model = EmulatedModel(setting["seconds"], setting["M"], setting["remat"])
    step = model.engine_step(setting["contenders"][0], setting["cuts"][str(K)], rank, K)
    warm_up([step], watch)
    mine, whole = dict.fromkeys((op.name.lower() for op in COMPUTE), 0.0), 0.0
    for _ in range(repetitions):
        whole += watch.time(step) / repetitions
        for (op, _cell), seconds in step.engine.meter.seconds().items():
            if op in COMPUTE:
                mine[op.name.lower()] += seconds / repetitions
    return {"cells": of_all_workers(mine, K), "step_seconds": whole}
