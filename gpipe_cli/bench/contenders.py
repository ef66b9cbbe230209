"""Runs a workload by every contender: the engine, a plain loop and torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

from gpipe_cli.launch.context import Context
from gpipe_cli.launch.messenger import LOCAL
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.schedule.instruction import COMPUTE

from .emulated import EXAMPLES, WIDTH, Link, Workload, join_emulation, warm_up
from .steps import CPU, EngineStep, Step, engine_step, make_cell, plain_step, split, squared_sum
from .throughput import PLAIN, TORCH
from .timing import StopWatch, of_all_workers, take_turns, typical

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OF_SEVERAL_STAGES = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
OF_SEVERAL_STAGES |= {"interleaved_1f1b": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
HALVES = ("zero_bubble", "zbv")


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
        name: a kind of schedule of the engine, or one of ``work.lists``; "torch " and one of `SCHEDULES` or
            `OF_SEVERAL_STAGES`; or "plain": one device runs all layers, while the other workers wait.
    """
    kind = name.removeprefix(TORCH)
    cells = 2 * work.K if kind.startswith("interleaved") or kind == "zbv" else work.K
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

    Returns:
        None where torch refuses: 1f1b with M < K, the schedules of several stages an M that is no multiple of K,
        micro-batches of different sizes; or where it would recompute in both halves of a backward.
    """
    K, M, rank = work.K, work.M, work.rank
    refused = M % K if kind in OF_SEVERAL_STAGES else kind == "1f1b" and M < K
    if refused or EXAMPLES % M or (kind in HALVES and work.remat != "never"):
        return None
    module = nn.Sequential if work.remat == "never" else _Checkpointed
    own = {cell: module(*work.layers(cells, cell, kind in HALVES)) for cell in stages_of(kind, rank, cells, K)}
    return scheduled(kind, own, cells, rank, *mini_batch(), M, squared_sum)


def stages_of(kind: str, rank: int, cells: int, workers: int) -> list[int]:
    """Returns the stages that lie on a worker: round robin, for ZBV in a V."""
    return [rank, cells - 1 - rank] if kind == "zbv" else [*range(rank, cells, workers)]


def scheduled(
    kind: str,
    own: Mapping[int, nn.Module],
    cells: int,
    rank: int,
    inputs: Tensor | Tensors,
    target: Tensor,
    M: int,
    loss: Callable[[Any, Tensor], Tensor],
) -> Step:
    """Builds the step of one of torch's schedules on this worker.

    Args:
        own: the modules of this worker's stages, of so many ``cells``.
        inputs, target: the mini-batch.
        loss: of the last stage's outputs for a micro-batch, a sum.
    """
    stages = [PipelineStage(module, cell, cells, CPU, group=peer_group()) for cell, module in own.items()]
    schedule: Any
    if kind in OF_SEVERAL_STAGES:
        schedule = OF_SEVERAL_STAGES[kind]([*stages], M, loss, scale_grads=False)
    else:
        schedule = SCHEDULES[kind](stages[0], M, loss, scale_grads=False)
    first = () if rank else (inputs,) if isinstance(inputs, Tensor) else inputs
    last = target if cells - 1 in own else None
    return lambda: schedule.step(*first, target=last, return_outputs=False)
