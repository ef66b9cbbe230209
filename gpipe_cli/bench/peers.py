"""Other pipelines, torch.distributed.pipelining and torchgpipe, given the same layers, for measuring beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.boundary import as_argument, as_tensors

from .driver import CPU, Step, squared_sum

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class Work:
    """What a peer's step is about.

    Attributes:
        inputs, targets: of the mini-batch, on the CPU; every step brings them to where they are needed, as ours does.
        loss: of a micro-batch's outputs and targets; the step adds the micro-batches' up.
        device: of this worker.
        real: layers compute: they may draw random numbers, which a recompute has to draw again, and hand on tuples or
            what is not contiguous.
    """

    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = squared_sum
    device: torch.device = CPU
    real: bool = False


class _Contiguous(torch.autograd.Function):
    """The same tensor, whose gradient is contiguous: torch's pipelining sends no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def stage_module(layers: Sequence[nn.Module], remat: bool, real: bool) -> nn.Module:
    """Layers as one module, with nothing more between them than they need.

    Args:
        remat: by torch.utils.checkpoint, the way to re-materialize there: recompute begins when the gradient has
            arrived, for every micro-batch.
        real: of `Work`.
    """
    if real:
        return RealStage(layers, remat)
    return _Checkpointed(*layers) if remat else nn.Sequential(*layers)


class _Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class RealStage(nn.Sequential):
    """Takes the tensors of a boundary one by one, and returns those of the next."""

    def __init__(self, layers: Sequence[nn.Module], remat: bool) -> None:
        super().__init__(*layers)
        self._remat = remat

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        received = [_Contiguous.apply(x) if x.requires_grad else x for x in inputs]
        if self._remat:
            outputs = checkpoint(self._run, *received, use_reentrant=False, preserve_rng_state=True)
        else:
            outputs = self._run(*received)
        return as_argument([y.contiguous() for y in as_tensors(outputs)])

    def _run(self, *inputs: Tensor) -> Any:
        return super().forward(as_argument(inputs))  # type: ignore[no-untyped-call]  # torch's own annotation


def torch_step(
    kind: str, chunks: Sequence[Sequence[nn.Module]], remat: bool, rank: int, K: int, M: int, work: Work
) -> Step | None:
    """A function that runs one training step of torch.distributed.pipelining on this worker.

    Args:
        kind: of `SCHEDULES`; with several chunks the schedule is the interleaved one, whatever it is called.
        chunks: the layers of this worker's stages; chunk c is stage c·K + rank.

    Returns:
        None where torch's schedule refuses: 1f1b with M < K, the interleaved one an M that is no multiple of K.
    """
    interleaved = len(chunks) > 1
    if M % K if interleaved else kind == "1f1b" and M < K:
        return None
    stages = [
        PipelineStage(stage_module(layers, remat, work.real), number * K + rank, len(chunks) * K, work.device)
        for number, layers in enumerate(chunks)
    ]
    if interleaved:
        return _step(ScheduleInterleaved1F1B([*stages], M, work.loss, scale_grads=False), rank, K, work)
    return _step(SCHEDULES[kind](stages[0], M, work.loss, scale_grads=False), rank, K, work)


def torchgpipe_step(
    cells: Sequence[Sequence[nn.Module]],
    remat: str,
    rank: int,
    M: int,
    work: Work,
    devices: Sequence[torch.device] | None = None,
) -> Step | None:
    """The same by torchgpipe, which is one process: worker 0 runs all cells while the others wait.

    Its thread is one a device and its backward one thread of autograd, so cells on CPUs follow each other.

    Args:
        devices: of each cell; None: the CPU.

    Returns:
        None where it is not installed.
    """
    if find_spec("torchgpipe") is None:
        return None
    if rank > 0:
        return lambda: None
    from torchgpipe import GPipe  # a peer that not everybody has installed

    places = [CPU] * len(cells) if devices is None else list(devices)
    whole = nn.Sequential(*(layer for layers in cells for layer in layers))
    pipeline = GPipe(whole, [len(layers) for layers in cells], devices=places, chunks=M, checkpoint=remat)

    def step() -> None:
        outputs = pipeline(work.inputs.to(places[0], non_blocking=True))
        work.loss(outputs, work.targets.to(places[-1], non_blocking=True)).backward()  # type: ignore[no-untyped-call]

    return step


def _step(schedule: Any, rank: int, K: int, work: Work) -> Step:
    def step() -> None:
        inputs = (work.inputs.to(work.device, non_blocking=True),) if rank == 0 else ()
        target = work.targets.to(work.device, non_blocking=True) if rank == K - 1 else None
        schedule.step(*inputs, target=target, return_outputs=False)

    return step
