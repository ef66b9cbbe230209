"""Runs one worker's part of table 1: a real training step on a device that holds only so many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.distributed.pipeline import make_transport
from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.partition import cell_layers, partition
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.planner.measure.tracking import Tracker

from .steps import as_loss, engine_step, make_cell, split

TOKENS, VOCABULARY = 64, 1000


class OverBudget(MemoryError):
    """Raised when a tensor is more than the budget holds."""


def worker(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Runs one training step of a Transformer-L, with an update by RMSProp.

    Args:
        config: the arguments of `attempt`.

    Raises:
        OverBudget, torch.OutOfMemoryError: the step does not fit on this worker; the others then wait for it.
    """
    return attempt(join_world(context, context.world_size, 1, "auto", "auto"), **config)


def attempt(world: World, L: int, width: int, texts: int, M: int, remat: str, budget: int) -> dict[str, int]:
    """Runs one step of a model of this depth and d_model, on mini-batches of so many texts.

    Args:
        budget: bytes that a worker's device holds.

    Returns:
        ``peak``: the most bytes of tensors alive on any worker (weights, gradients, optimizer, activations, messages);
        ``parameters``: of the whole model.
    """
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (texts, TOKENS + 1))
    examples = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    builders = transformer_lm(L, 4 * width, width // 64, VOCABULARY, width)
    costs = layer_costs(builders, (examples[0][:1],), "flops")
    sizes = partition([layer.cost for layer in costs], world.workers, "min_max")
    with _held_to(budget, world.device) as counted:
        mine, placement = cell_layers(sizes)[world.worker], tuple(range(world.workers))
        modules = [build_layer(builders[i], i, 0, world.device) for i in mine]
        cell, transport = make_cell(world.worker, modules, mine.start, world.device), make_transport(world, placement)
        loss, micro_batches, scale = as_loss(cross_entropy_sum), split(examples, M), 1 / texts
        step = engine_step(
            [cell], placement, world.worker, transport, micro_batches, "gpipe", remat, loss, scale, world.device
        )
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = torch.optim.RMSprop(parameters, lr=1e-6, momentum=0.9)
        step()
        optimizer.step()
        peak = torch.tensor([torch.cuda.max_memory_allocated(world.device) if counted is None else counted.peak])
    if world.all_ranks is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=world.all_ranks)
    return {"peak": int(peak), "parameters": sum(layer.parameters for layer in costs)}


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


@contextmanager
def _held_to(budget: int, device: torch.device) -> Iterator[_CountedTensors | None]:
    """Limits a device to so many bytes: a GPU by its own allocator, a CPU by counting tensors."""
    if device.type != "cuda":
        with _CountedTensors(budget) as counted:
            yield counted
        return
    whole = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / whole), device)
    torch.cuda.reset_peak_memory_stats(device)
    yield None


class _CountedTensors(Tracker):  # type: ignore[no-untyped-call]  # torch's own
    """Counts bytes as the planner's tracker does, and refuses a tensor that a device of ``budget`` bytes would."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self._budget = budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.now > self._budget:
            raise OverBudget(f"{self.now:,} bytes of tensors where the budget is {self._budget:,}")
        return out
