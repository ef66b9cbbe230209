"""Sums gradients early and divides the optimizer's state over replicas, for test_sharding.py."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from gpipe_cli.distributed.exchange import all_gather_json
from gpipe_cli.launch.context import Context
from gpipe_cli.optim.sharding import OptimizerShards
from gpipe_cli.pipeline.gradients import begin_reduction, reduce_over_replicas

SHAPES = [(7, 5), (5,), (3, 4), (1,), (64, 2)]


def model(replica: int) -> list[nn.Parameter]:
    """Returns equal weights on every replica, with gradients of its own; the last is frozen."""
    weights = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in SHAPES]
    for weight in weights[:-1]:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(replica))
    return [*weights[:-1], weights[-1].requires_grad_(False)]


def compare(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of a worker: lists what differs from whole sums and an optimizer of all parameters."""
    context.init_process_group()
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    whole, divided = model(context.rank), model(context.rank)
    reduce_over_replicas(whole, group)
    finish = [begin_reduction(divided[start : start + 2], group) for start in range(0, len(SHAPES), 2)]
    for each in finish:
        each()
    shards = OptimizerShards(divided, group, lambda value: all_gather_json(value, group))
    everything, share = torch.optim.Adam(whole, lr=0.1), torch.optim.Adam(shards.own, lr=0.1)
    for _ in range(2):
        everything.step()
        share.step()
        shards.spread()
    others = shards.state_of_others(share.state, keep=context.rank == 0)
    found = [f"weight {n}" for n, pair in enumerate(zip(whole, divided, strict=True)) if not torch.equal(*pair)]
    found += [f"{len(others)} states kept"] * (context.rank > 0 and bool(others))
    for number, parameter in enumerate(divided if context.rank == 0 else shards.own):
        state, expected = {**share.state, **others}.get(parameter, {}), everything.state.get(whole[number], {})
        if context.rank == 0:
            equal = all(torch.equal(state[key], value) for key, value in expected.items())
            found += [] if state.keys() == expected.keys() and equal else [f"state {number}"]
    return found
