"""One worker's part of table 1: the largest model whose training step keeps within a budget of bytes, by real steps."""

from __future__ import annotations

from collections.abc import Callable
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
    """Entry point: the largest L whose step fits; every attempt is a real step.

    Args:
        config: ``budget`` (bytes a worker), ``most`` (no larger L is tried), ``M``, ``remat``.

    Returns:
        The fields of the largest `Trial` that fits; ``steps``, the number of attempts; ``or_more``: larger ones were
        not tried, and may fit too. None where L=1 does not fit.
    """
    world = join_world(context, context.world_size, 1, "auto", "auto")
    trials: dict[int, Trial] = {}

    def fits(L: int) -> bool:
        trials[L] = attempt(L, config["M"], config["remat"], world)
        return trials[L].peak <= int(config["budget"])

    found = largest(fits, config["most"])
    if not found:
        return None
    return {**vars(trials[found]), "steps": len(trials), "or_more": found == config["most"]}


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, by doubling and halving; 0 where 1 does not.

    Args:
        fits: of those up to some number true; asked once of any.
    """
    low, high = 0, 1
    while fits(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
