"""Defines what the workers of a small group do in tests: sums, messages, shared statistics."""

import time
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_cli.distributed.optimizer_shards import OptimizerShards
from gpipe_cli.distributed.world import Exchange, World, all_gather_json
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.pipeline.batchnorm import defer_batchnorm, finish_batchnorm
from gpipe_cli.pipeline.gradients import ReplicaSums, sum_over_replicas
from gpipe_cli.pipeline.messages.boundary import BoundarySpec, is_channels_last
from gpipe_cli.pipeline.messages.shared_memory import SharedMemoryTransport
from gpipe_cli.pipeline.messages.transport import Transport
from gpipe_cli.schedule.instruction import Message
from gpipe_cli.trainer.hang import hangs_told

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 7, 4096, 4099)
SHAPES = [(7, 5), (5,), (3, 4), (1,), (2,), (64, 2), (6,), (4,)]
IMAGES = ([3, 3, 2], [3, 2, 4])  # of each replica in two micro-batches
Found = TypeVar("Found")


def joined(context: Context, backend: str | None = None) -> dist.ProcessGroup:
    """Joins the group of all workers."""
    context.init_process_group(backend)
    return cast(dist.ProcessGroup, dist.group.WORLD)


def of_all(found: list[Found]) -> list[Found]:
    """Returns what all workers have found, one worker's after another's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return [one for worker in everyone for one in worker]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- sums and values ---------------------------------------------------------------------------------------------------


def meet(context: Context, config: dict[str, Any]) -> list[Any]:
    """Returns every rank's totals of two exchanges over the tree of all ranks, and what passed as JSON."""
    group, rank = joined(context, config["backend"]), context.rank
    exchange, totals = Exchange({"own": context.world_size, "all": 1}, group), []
    for step in range(2):
        exchange.own["own"][rank] = 0.1 * (rank + step)
        exchange.own["all"][0] = 1
        exchange.run()
        totals.append([*exchange.total["own"].tolist(), *exchange.total["all"].tolist()])
    world = World(rank, context.world_size, 1, CPU, CPU, group, None, None)
    passed = [world.gather([rank]), world.broadcast(lambda: {"from": rank})]
    return world.all_gather([totals, passed])


def sums(context: Context, config: dict[str, Any]) -> list[int]:
    """Returns the sizes whose sum over replicas has other bits than the sum in the order of the replicas."""
    group, wrong = joined(context), []
    for size in SIZES:
        expected, *others = (drawn(size, seed=rank) for rank in range(group.size()))
        summed = drawn(size, seed=group.rank())
        sum_over_replicas(summed, group)
        for other in others:
            expected += other
        wrong += [] if torch.equal(summed, expected) else [size]
    return wrong


def weights(replica: int) -> list[nn.Parameter]:
    """Returns equal weights on every replica, with gradients of its own; the last is frozen."""
    made = [nn.Parameter(drawn(*shape, seed=1)) for shape in SHAPES]
    for weight in made[:-1]:
        weight.grad = drawn(*weight.shape, seed=replica)
    return [*made[:-1], made[-1].requires_grad_(False)]


def shard(context: Context, config: dict[str, Any]) -> list[str]:
    """Sums gradients and divides the optimizer's state; lists what differs from whole sums and states."""
    group = joined(context)
    whole, divided = weights(context.rank), weights(context.rank)
    ReplicaSums(group).finish(whole)
    with patch("gpipe_cli.pipeline.gradients.BUCKET_BYTES", 1):  # so that more buckets are under way than may be
        (sums := ReplicaSums(group)).begin(divided[2:])
        sums.finish(divided)
    shards = OptimizerShards(divided, group, lambda value: all_gather_json(value, group))
    everything, share = torch.optim.Adam(whole, lr=0.1), torch.optim.Adam(shards.own, lr=0.1)
    for _ in range(2):
        everything.step()
        share.step()
        shards.spread()
    others = shards.state_of_others(share.state, keep=context.rank == 0)
    found = [f"weight {n}" for n, pair in enumerate(zip(whole, divided, strict=True)) if not torch.equal(*pair)]
    if context.rank > 0:
        return [*found, *(f"{len(others)} states kept" for _ in others)]
    for number, parameter in enumerate(divided):
        state, expected = {**share.state, **others}.get(parameter, {}), everything.state.get(whole[number], {})
        equal = all(torch.equal(state[key], value) for key, value in expected.items())
        found += [] if state.keys() == expected.keys() and equal else [f"state {number}"]
    return found


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


def normalised(replica: int, replicas: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Returns outputs, gradients and statistics of a replica; without a group by the joined micro-batches."""
    norm: Any = defer_batchnorm(nn.BatchNorm2d(5, momentum=0.3), group)
    found: dict[str, Any] = {}
    for number, sizes in enumerate(each[:replicas] for each in IMAGES):
        joint = drawn(sum(sizes), 5, 4, 4, seed=number) * 3 + 100
        leaves = (joint if group is None else torch.split(joint, sizes)[replica].clone()).requires_grad_()
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


def normalise(context: Context, config: dict[str, Any]) -> list[str]:
    """Lists what replicas with shared statistics have other than the joined micro-batches, in float64."""
    torch.set_default_dtype(torch.float64)
    place = context.rank, context.world_size
    found, expected = normalised(*place, joined(context)), normalised(*place, None)
    return of_all([name for name in found if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-10)])


# -- a hang ------------------------------------------------------------------------------------------------------------


def hang(context: Context, config: dict[str, Any]) -> list[str]:
    """Stands still in all workers but the last, which goes on; returns what is told of it."""
    joined(context)
    told: list[str] = []
    context.emit = lambda event: told.append(event["text"])
    context.where.enter(context.rank, 3, "forward")
    with hangs_told(context, config["minutes"]):
        until = time.monotonic() + (6 if context.rank == context.world_size - 1 else 0)
        while time.monotonic() < until:  # the others wait
            context.where.micro_batch = time.monotonic_ns()
            time.sleep(0.02)
        dist.barrier()
    return of_all(told)


# -- messages ----------------------------------------------------------------------------------------------------------


def messages() -> list[Tensors]:
    """Returns messages with every sort of tensor and layout; each larger than the one before, then small again."""
    numbers, images = torch.arange(1, 31), drawn(2, 3, 4, 5, seed=2)
    return [
        (torch.tensor(3.5), torch.tensor(True)),
        (numbers.bool()[:7],),
        (images.to(memory_format=torch.channels_last), torch.arange(7)),
        (images, drawn(6, 4, seed=3).t(), numbers[::3], drawn(1, 4, seed=3).expand(3, 4)),
        (drawn(300, 7, seed=3).requires_grad_(), torch.tensor([True, False]), drawn(5, seed=4).bfloat16()),
        (drawn(1000, 1000, seed=5), torch.zeros(0, 4), numbers.int()),
        (torch.zeros(0, 4),),
        (drawn(4, seed=6).double(),),
    ]


def send_both_ways(context: Context, config: dict[str, Any]) -> list[bool]:
    """Checks that every message arrives unchanged, twice, and does not change when its slot is used again."""
    group, same = joined(context), []
    shared = config["wire"] == "shared memory"
    control = group if shared else dist.new_group(backend="gloo")
    channel = (SharedMemoryTransport if shared else Transport)((0, 1), CPU, CPU, (control, control), control)
    for step, direction in enumerate(("activation", "gradient")):
        sent = [(Message(direction, 0, number), tensors) for number, tensors in enumerate(messages())]
        if context.rank == step:
            for message, tensors in sent:
                channel.send(message, tensors, BoundarySpec.of(tensors))
            channel.drain()
        else:
            got = [channel.post(message, BoundarySpec.of(tensors))(0) for message, tensors in sent]
            for mine, theirs in zip(sum((tensors for _, tensors in sent), ()), sum(got, ()), strict=True):
                same.append(torch.equal(mine, theirs) and mine.dtype == theirs.dtype and not theirs.requires_grad)
                same.append(is_channels_last(mine) == is_channels_last(theirs))
                same.append(theirs.is_contiguous() or is_channels_last(mine))
    return of_all(same)
