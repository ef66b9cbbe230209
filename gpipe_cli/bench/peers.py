"""Other pipelines, torch.distributed.pipelining and torchgpipe, given the same layers, for measuring beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from .driver import CPU, Step

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class _Checkpointed(nn.Sequential):
    """The way to re-materialize there: recompute begins when the gradient has arrived, for every micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def torch_pipelining_step(
    kind: str, layers: Sequence[nn.Module], remat: bool, rank: int, K: int, M: int, batch: Tensor
) -> Step | None:
    """A function that runs one training step on this worker; None where torch's schedule refuses M < K."""
    if kind == "1f1b" and M < K:
        return None
    stage = PipelineStage(_stage_module(layers, remat), rank, K, CPU)
    schedule = SCHEDULES[kind](stage, M, partial(mse_loss, reduction="sum"), scale_grads=False)
    return _step(schedule, rank, K, batch)


def torch_interleaved_step(
    chunks: Sequence[Sequence[nn.Module]], remat: bool, rank: int, K: int, M: int, batch: Tensor
) -> Step | None:
    """The same with several stages a worker: chunk c of this worker is stage c·K + rank.

    Returns:
        None where torch's schedule refuses an M that is no multiple of K.
    """
    if M % K:
        return None
    stages = [
        PipelineStage(_stage_module(layers, remat), number * K + rank, len(chunks) * K, CPU)
        for number, layers in enumerate(chunks)
    ]
    loss = partial(mse_loss, reduction="sum")
    return _step(ScheduleInterleaved1F1B([*stages], M, loss, scale_grads=False), rank, K, batch)


def torchgpipe_step(cells: Sequence[Sequence[nn.Module]], remat: str, rank: int, M: int, batch: Tensor) -> Step | None:
    """The same by torchgpipe, which is one process: worker 0 runs all cells while the others wait.

    Its thread is one a device and its backward one thread of autograd, so cells on CPUs follow each other.

    Returns:
        None where it is not installed.
    """
    if find_spec("torchgpipe") is None:
        return None
    if rank > 0:
        return lambda: None
    from torchgpipe import GPipe  # a peer that not everybody has installed

    whole = nn.Sequential(*(layer for layers in cells for layer in layers))
    pipeline = GPipe(whole, [len(layers) for layers in cells], devices=[CPU] * len(cells), chunks=M, checkpoint=remat)

    def step() -> None:
        mse_loss(pipeline(batch), batch, reduction="sum").backward()  # type: ignore[no-untyped-call]  # torch's own

    return step


def _stage_module(layers: Sequence[nn.Module], remat: bool) -> nn.Module:
    return _Checkpointed(*layers) if remat else nn.Sequential(*layers)


def _step(schedule: Any, rank: int, K: int, batch: Tensor) -> Step:
    inputs = (batch,) if rank == 0 else ()
    target = batch if rank == K - 1 else None

    def step() -> None:
        schedule.step(*inputs, target=target, return_outputs=False)

    return step
