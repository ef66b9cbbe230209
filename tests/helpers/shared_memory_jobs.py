"""Runs two workers that send messages through shared memory, for test_shared_memory.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.messages.boundary import BoundarySpec
from gpipe_cli.pipeline.messages.transport import Transport, connect_workers
from gpipe_cli.schedule.instruction import Message

CPU = torch.device("cpu")


def join(context: Context) -> Transport:
    """Connects worker 0, which sends activations, with worker 1, which sends gradients."""
    if not dist.is_initialized():
        context.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    return connect_workers((0, 1), CPU, CPU, (world, world), world)


def take(channel: Transport, spec: BoundarySpec, number: int, direction: str = "activation") -> Tensors:
    return channel.post(Message(direction, 0, number), spec)(0)


def messages() -> list[Tensors]:
    """Returns messages with every sort of tensor; each larger than the one before, then small again."""
    random = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return [
        (noise(3),),
        (noise(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.arange(7)),
        (noise(300, 7).requires_grad_(), torch.tensor([True, False]), noise(5).bfloat16()),
        (noise(1000, 1000), torch.zeros(0, 4)),
        (torch.zeros(0, 4),),
        (noise(4).double(),),
    ]


def both_ways(context: Context, config: dict[str, Any]) -> list[bool]:
    """Checks that every message arrives unchanged, twice, and does not change when its slot is used again."""
    channel = join(context)
    same = []
    for step in range(2):
        direction = "activation" if step == 0 else "gradient"
        sent = messages()
        if context.rank == step:
            for number, tensors in enumerate(sent):
                channel.send(Message(direction, 0, number), tensors, BoundarySpec.of(tensors))
        else:
            got = [take(channel, BoundarySpec.of(tensors), number, direction) for number, tensors in enumerate(sent)]
            for mine, theirs in zip(sum(sent, ()), sum(got, ()), strict=True):
                same.append(torch.equal(mine, theirs) and mine.stride() == theirs.stride())
                same.append(not theirs.requires_grad)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, same)
    return [each for worker in everyone for each in worker]


def wrong_order(context: Context, config: dict[str, Any]) -> None:
    channel = join(context)
    message = (torch.zeros(3),)
    if context.rank == 0:
        channel.send(Message("activation", 0, 7), message, BoundarySpec.of(message))
        time.sleep(60)
    take(channel, BoundarySpec.of(message), 6)


def kill_beside_receive(context: Context, config: dict[str, Any]) -> None:
    """Ends worker 1 while worker 0 waits for its gradient."""
    channel = join(context)
    dist.barrier()
    if context.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    take(channel, BoundarySpec.of((torch.zeros(3),)), 0, "gradient")
