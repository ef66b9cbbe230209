"""Runs a workload by every contender: the engine, a plain loop and torch.distributed.pipelining."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from gpipe_cli.launch.context import Context
from gpipe_cli.launch.mailboxes import LOCAL
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.schedule.instruction import COMPUTE

from .emulated import EXAMPLES, WIDTH, Link, Workload, join_emulation, warm_up
from .steps import CPU, EngineStep, Step, engine_step, make_cell, plain_step, split, squared_sum
from .throughput import PLAIN, TORCH
from .timing import StopWatch, of_all_workers, take_turns, typical

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures the contenders of some settings.

    Args:
        config: ``repetitions``, ``realtime`` and ``settings`` (`Setting.config`).

    Returns:
        For each setting ``seconds``: median of each contender's steps, None where it refuses the setting; ``cells``:
        for each worker the median seconds of a step by kind of computation, of the first contender.
    """
    watch = join_emulation(context, config["realtime"])
    return [measure(setting, context, config["repetitions"], watch) for setting in config["settings"]]


def measure(setting: dict[str, Any], context: Context, repetitions: int, watch: StopWatch) -> dict[str, Any]:
    """Lets the contenders of one setting take turns."""
    cuts = {int(cells): sizes for cells, sizes in setting["cuts"].items()}
    link = None if setting["link"] is None else Link(**setting["link"])
    rank, K = context.rank, context.world_size
    lists = setting.get("lists", {})
    work = Workload(setting["seconds"], cuts, setting["M"], setting["remat"], rank, K, link, lists)
    steps = {name: contender(name, work) for name in setting["contenders"]}
    running = {name: step for name, step in steps.items() if step is not None}
    spent: dict[str, list[float]] = {op.name.lower(): [] for op in COMPUTE}

    def timed(name: str, step: Step) -> float:
        seconds = watch.time(step)
        if name == setting["contenders"][0] and isinstance(step, EngineStep):
            found = step.engine.meter.seconds()
            for op in COMPUTE:
                spent[op.name.lower()].append(sum(taken for (kind, _cell), taken in found.items() if kind is op))
        return seconds

    warm_up(running.values(), watch)
    turns = {name: partial(timed, name, step) for name, step in running.items()}
    seconds = take_turns(turns, repetitions)
    return {
        "seconds": {name: typical(seconds.get(name)) for name in steps},
        "cells": of_all_workers({kind: typical(steps) or 0.0 for kind, steps in spent.items()}, K),
    }


def contender(name: str, work: Workload) -> Step | None:
    """Builds the step of one contender on this worker; None, on all workers, where it refuses the workload.

    Args:
        name: a kind of schedule of the engine, or one of ``work.lists``; "torch gpipe", "torch 1f1b" or "torch
            interleaved"; or "plain": one device runs all layers, while the other workers wait.
    """
    kind = name.removeprefix(TORCH)
    cells = 2 * work.K if kind.startswith("interleaved") else work.K
    kind, cells, policy = work.lists.get(name, (kind, cells, work.remat))
    if cells not in work.cuts:
        return None
    if name.startswith(TORCH):
        return torch_step(kind, cells, work)
    if name == PLAIN:  # the other workers wait
        modules = [module for cell in range(work.K) for module in work.layers(work.K, cell)]
        return plain_step(modules, split(mini_batch(), work.M)) if work.rank == 0 else lambda: None
    placement = tuple(cell % work.K for cell in range(cells))
    mine = [
        make_cell(cell, work.layers(cells, cell, kind == "zero_bubble"), layers.start)
        for cell, layers in enumerate(cell_layers(work.cuts[cells]))
        if placement[cell] == work.rank
    ]
    micro_batches = split(mini_batch(), work.M)
    return engine_step(mine, placement, work.rank, work.transport(placement), micro_batches, kind, policy)


def mini_batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(EXAMPLES, WIDTH), torch.zeros(EXAMPLES, WIDTH)


class _Checkpointed(nn.Sequential):
    """Recomputes by torch.utils.checkpoint, the way of torch's pipelining: begun when the gradient has arrived."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


@cache
def peer_group() -> dist.ProcessGroup | None:
    """Returns the group for torch's pipelining: gloo where the job has a group of ours, which it cannot use."""
    ours = dist.is_initialized() and dist.get_backend() == LOCAL
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if ours else None


def torch_step(kind: str, cells: int, work: Workload) -> Step | None:
    """Builds the step of torch.distributed.pipelining on this worker.

    Args:
        kind: of `SCHEDULES`; with more cells than workers the schedule is the interleaved one, whatever it is called.

    Returns:
        None where torch refuses: 1f1b with M < K, the interleaved schedule an M that is no multiple of K, micro-batches
        of different sizes.
    """
    K, M, rank = work.K, work.M, work.rank
    interleaved = cells > K
    inputs, targets = mini_batch()
    if (M % K if interleaved else kind == "1f1b" and M < K) or len(inputs) % M:
        return None
    module = nn.Sequential if work.remat == "never" else _Checkpointed
    stages = [
        PipelineStage(module(*work.layers(cells, cell)), cell, cells, CPU, group=peer_group())
        for cell in range(rank, cells, K)
    ]
    schedule: Any
    if interleaved:
        schedule = ScheduleInterleaved1F1B([*stages], M, squared_sum, scale_grads=False)
    else:
        schedule = SCHEDULES[kind](stages[0], M, squared_sum, scale_grads=False)
    mine = (inputs,) if rank == 0 else ()
    target = targets if rank == K - 1 else None
    return lambda: schedule.step(*mine, target=target, return_outputs=False)
