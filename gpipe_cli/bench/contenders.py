"""Runs a workload by every contender: the engine, a plain loop and torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from gpipe_cli.distributed.world import join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.launch.mailboxes import LOCAL
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.messages.grouping import as_argument, as_tensors
from gpipe_cli.schedule.instruction import COMPUTE

from .emulated import Link, emulated_workload, join_emulation, warm_up
from .models import real_workload
from .steps import EngineStep, Step, Workload, as_loss, plain_step, split, workload_step
from .throughput import PLAIN, TORCH
from .timing import StopWatch, of_all_workers, take_turns, typical

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LEARNING_RATE = 1e-6  # of plain SGD; small, so that the weights of a measurement stay finite


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures the contenders of some settings.

    Args:
        config: ``repetitions``, ``realtime``, ``real`` and ``settings`` (`Setting.config`).

    Returns:
        For each setting ``seconds``: median of each contender's steps, None where it refuses the setting; ``cells``:
        for each worker the median seconds of a step by kind of computation, of the first contender (emulated layers
        only).
    """
    if config["real"]:
        world = join_world(context, context.world_size, 1, "auto", "auto")
        watch = StopWatch(world.rank, world.size)
        workloads = [real_workload(setting, world) for setting in config["settings"]]
    else:
        watch = join_emulation(context, config["realtime"])
        workloads = [_emulated(setting, context.rank, context.world_size) for setting in config["settings"]]
    return [
        measure(setting, work, config["repetitions"], watch)
        for setting, work in zip(config["settings"], workloads, strict=True)
    ]


def _emulated(setting: dict[str, Any], rank: int, K: int) -> Workload:
    cuts = {int(cells): sizes for cells, sizes in setting["cuts"].items()}
    link = None if setting["link"] is None else Link(**setting["link"])
    return emulated_workload(setting["seconds"], cuts, setting["M"], setting["remat"], rank, K, link)


def measure(setting: dict[str, Any], work: Workload, repetitions: int, watch: StopWatch) -> dict[str, Any]:
    """Lets the contenders of one setting take turns."""
    steps = {name: contender(name, replace(work, built=[])) for name in setting["contenders"]}
    running = {name: step for name, step in steps.items() if step is not None}
    spent: dict[str, list[float]] = {op.name.lower(): [] for op in COMPUTE}

    def timed(name: str, step: Step) -> float:
        seconds = watch.time(step)
        if name == setting["contenders"][0] and isinstance(step, EngineStep):
            found = step.engine.meter.seconds()
            for op in COMPUTE:
                spent[op.name.lower()].append(sum(taken for (kind, _cell), taken in found.items() if kind is op))
        return seconds

    if not work.real:
        warm_up(running.values(), watch)
    turns = {name: partial(timed, name, step) for name, step in running.items()}
    seconds = take_turns(turns, repetitions, warm_up=int(work.real))
    return {
        "seconds": {name: typical(seconds.get(name)) for name in steps},
        "cells": of_all_workers({kind: typical(steps) or 0.0 for kind, steps in spent.items()}, work.K),
    }


def contender(name: str, work: Workload) -> Step | None:
    """Builds the step of one contender on this worker; None, on all workers, where it refuses the workload.

    Real layers are followed by an update of the weights.

    Args:
        name: a kind of schedule of the engine; "torch gpipe", "torch 1f1b" or "torch interleaved"; or
            "plain": one device runs all layers, while the other workers wait.
    """
    step = bare_step(name, work)
    return with_update(step, work) if work.real and step is not None else step


def bare_step(name: str, work: Workload) -> Step | None:
    """Builds the step of `contender` without an update of the weights."""
    kind = name.removeprefix(TORCH)
    cells = 2 * work.K if kind.startswith("interleaved") else work.K
    if cells not in work.cuts:
        return None
    if name == PLAIN:
        return plain_contender(work)
    if name.startswith(TORCH):
        return torch_step(kind, cells, work)
    return workload_step(work, kind, cells)


def with_update(step: Step, work: Workload) -> Step:
    """Adds an update by plain SGD, and waits for this worker's device."""
    parameters = work.parameters
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE) if parameters else None

    def whole() -> None:
        step()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if work.device.type == "cuda":
            torch.cuda.synchronize(work.device)

    return whole


def plain_contender(work: Workload) -> Step:
    """Builds a loop on the first worker's device; the other workers wait."""
    if work.rank > 0:
        return lambda: None
    modules = [module for cell in range(work.K) for module in work.layers(work.K, cell)]
    loss = as_loss(work.scaled_loss)

    def step() -> None:
        inputs, targets = (tensor.to(work.device, non_blocking=True) for tensor in work.examples)
        plain_step(modules, split((inputs, targets), work.M), loss)()

    return step


class _Contiguous(torch.autograd.Function):
    """Returns the same tensor, whose gradient is contiguous: torch's pipelining sends no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def stage_module(work: Workload, cells: int, cell: int) -> nn.Module:
    """Makes the layers of a cell as one module, with nothing more between them than they need.

    Recompute is by torch.utils.checkpoint, the way of that library: it begins when the gradient has arrived, for every
    micro-batch.
    """
    layers, remat = work.layers(cells, cell), work.remat != "never"
    if work.real:
        return RealStage(layers, remat)
    return _Checkpointed(*layers) if remat else nn.Sequential(*layers)


class _Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class RealStage(nn.Sequential):
    """Maps the tensors of a boundary, one argument each, to those of the next."""

    def __init__(self, layers: Sequence[nn.Module], remat: bool) -> None:
        super().__init__(*layers)
        self._remat = remat

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        received = [_Contiguous.apply(x) if x.requires_grad else x for x in inputs]
        if self._remat:
            outputs = checkpoint(self._run, *received, use_reentrant=False, preserve_rng_state=True)
        else:
            outputs = self._run(*received)
        made: Tensor | Tensors = as_argument([y.contiguous() for y in as_tensors(outputs)])
        return made

    def _run(self, *inputs: Tensor) -> Any:
        return super().forward(as_argument(inputs))  # type: ignore[no-untyped-call]  # torch's own annotation


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
        of different sizes, several workers on one GPU.
    """
    K, M, rank = work.K, work.M, work.rank
    interleaved = cells > K
    if (M % K if interleaved else kind == "1f1b" and M < K) or len(work.examples[0]) % M or work.shares_gpu:
        return None
    group = peer_group()
    stages = [
        PipelineStage(stage_module(work, cells, cell), cell, cells, work.device, group=group)
        for cell in range(rank, cells, K)
    ]
    loss = work.scaled_loss
    schedule: Any
    if interleaved:
        schedule = ScheduleInterleaved1F1B([*stages], M, loss, scale_grads=False)
    else:
        schedule = SCHEDULES[kind](stages[0], M, loss, scale_grads=False)
    inputs, targets = work.examples

    def step() -> None:
        mine = (inputs.to(work.device, non_blocking=True),) if rank == 0 else ()
        target = targets.to(work.device, non_blocking=True) if rank == K - 1 else None
        schedule.step(*mine, target=target, return_outputs=False)

    return step
