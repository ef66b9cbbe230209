"""Normalises micro-batches of two replicas with shared BatchNorm statistics, and the joined ones in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.batchnorm import defer_batchnorm, finish_batchnorm

SIZES = ([3, 3], [3, 2])  # images of each replica in two micro-batches


def train(replica: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Returns outputs, gradients and statistics of a replica; without a group by the joined micro-batches."""
    drawn = torch.Generator().manual_seed(1)
    norm: Any = defer_batchnorm(nn.BatchNorm2d(5, momentum=0.3), group)
    found: dict[str, Any] = {}
    for number, sizes in enumerate(SIZES):
        both = torch.randn(sum(sizes), 5, 4, 4, generator=drawn) * 3 + 100
        leaves = (both if group is None else torch.split(both, sizes)[replica].clone()).requires_grad_()
        outputs = norm(leaves)
        outputs.pow(3).sum().backward()
        assert leaves.grad is not None
        for name, value in (("outputs", outputs.detach()), ("gradient of inputs", leaves.grad)):
            found[f"{name} {number}"] = torch.split(value, sizes)[replica] if group is None else value
    for name, parameter in norm.named_parameters():
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
        found[f"gradient of {name}"] = parameter.grad
    finish_batchnorm([norm], group)
    return found | dict(norm.named_buffers())


def compare(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of a worker: lists what differs from the joined micro-batches, in float64."""
    torch.set_default_dtype(torch.float64)
    context.init_process_group()
    found, expected = train(context.rank, dist.group.WORLD), train(context.rank, None)
    wrong = [name for name, value in found.items() if not torch.allclose(value, expected[name], rtol=1e-9, atol=1e-10)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, wrong)
    return [text for worker in everyone for text in worker]
