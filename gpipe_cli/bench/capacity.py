"""One worker's part of table 1: the largest model whose training step keeps within a budget of bytes, by real steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.launch.context import Context
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.pipeline.cost import layer_costs
from gpipe_cli.pipeline.partition import partition
from gpipe_cli.planner.tracking import Tracker
from gpipe_cli.trainer.world import World, join_world

from .real import parameters_of, real_step

# A narrow Transformer-L, whose steps take seconds on a laptop.
WIDTH, INNER, HEADS, VOCABULARY, TOKENS, EXAMPLES = 128, 512, 2, 1000, 64, 32
LARGEST_L = 512


@dataclass(frozen=True)
class Trial:
    """One training step with an update by RMSProp.

    Attributes:
        peak: most bytes of tensors alive on any worker: weights, gradients, optimizer, activations, messages.
        parameters: of the whole model.
    """

    L: int
    peak: int
    parameters: int


def worker(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Entry point: the largest L whose step fits, by doubling and halving; every attempt is a real step.

    Args:
        config: ``budget`` (bytes a worker), ``M``, ``remat``.

    Returns:
        The fields of the largest `Trial` that fits, and ``steps``, the number of attempts; None where L=1 does not fit.
    """
    world = join_world(context, context.world_size, 1, "auto", "auto")
    trials: dict[int, Trial] = {}

    def fits(L: int) -> bool:
        if L not in trials:
            trials[L] = attempt(L, config["M"], config["remat"], world)
        return trials[L].peak <= int(config["budget"])

    low = 1
    if not fits(low):
        return None
    high = 2
    while high <= LARGEST_L and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {**vars(trials[low]), "steps": len(trials)}


def attempt(L: int, M: int, remat: str, world: World) -> Trial:
    """One step of a new model; every worker finds the same peak."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (EXAMPLES, TOKENS + 1))
    examples = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    builders = transformer_lm(L, INNER, HEADS, VOCABULARY, WIDTH)
    costs = layer_costs(builders, (examples[0][:1],), "flops")
    sizes = partition([layer.cost for layer in costs], world.workers, "min_max")
    tracker = Tracker()
    with tracker:
        step = real_step(builders, sizes, world, examples, M, "gpipe", remat)
        optimizer = torch.optim.RMSprop(parameters_of(step), lr=1e-6, momentum=0.9)
        step()
        optimizer.step()
    peak = torch.tensor([tracker.peak])
    if world.everyone is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=world.everyone)
    return Trial(L, int(peak), sum(layer.parameters for layer in costs))
