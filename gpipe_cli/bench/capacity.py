"""Runs one worker's part of table 1: a real training step on a device that holds only so many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.cpu import free_memory
from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.context import Context
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.partition import partition
from gpipe_cli.planner.measure.tracking import Tracker

from .models import workload_of
from .steps import workload_step

VOCABULARY = 1000
TENSORS = 0.8  # of a CPU's free memory; the rest is for the processes themselves


class OverBudget(MemoryError):
    """Raised when a tensor is more than the budget holds."""


@dataclass(frozen=True)
class Trial:
    """Describes one training step of a Transformer-L, with an update by RMSProp.

    Attributes:
        L, width: its depth and d_model.
        tokens: tokens per text.
        texts: texts per mini-batch.
        budget: bytes that a worker's device holds.
    """

    L: int
    width: int
    tokens: int
    texts: int
    M: int
    remat: str
    budget: int


def device_memory(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Measures the memory that this machine has for each worker of table 1.

    Args:
        config: ``workers``: the largest number of workers.

    Returns:
        ``budget``: bytes of one worker, its share where several use one device; ``kind``: cpu or cuda.

    Raises:
        ConfigurationError: the system does not report its memory.
    """
    device = join_world(context, context.world_size, 1, "auto", "auto").device
    if device.type == "cuda":
        sharing = math.ceil(config["workers"] / torch.cuda.device_count())
        return {"budget": torch.cuda.mem_get_info(device)[0] // sharing, "kind": device.type}
    memory = free_memory()
    if memory is None:
        raise ConfigurationError("memory=device: this system does not report its memory; give a size, as 4GB")
    return {"budget": int(TENSORS * memory / config["workers"]), "kind": device.type}


def worker(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Runs one trial.

    Args:
        config: the fields of `Trial`.

    Returns:
        ``peak``: the most bytes of tensors alive on any worker (weights, gradients, optimizer, activations, messages);
        ``parameters``: of the whole model.

    Raises:
        OverBudget, torch.OutOfMemoryError: the step does not fit on this worker; the others then wait for it.
    """
    return attempt(Trial(**config), join_world(context, context.world_size, 1, "auto", "auto"))


def attempt(trial: Trial, world: World) -> dict[str, int]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (trial.texts, trial.tokens + 1))
    examples = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    builders = transformer_lm(trial.L, 4 * trial.width, trial.width // 64, VOCABULARY, trial.width)
    costs = layer_costs(builders, (examples[0][:1],), "flops")
    sizes = partition([layer.cost for layer in costs], world.workers, "min_max")
    with _held_to(trial.budget, world.device) as memory:
        work = workload_of(builders, {world.workers: sizes}, trial.M, trial.remat, examples, world)
        step = workload_step(work, "gpipe", world.workers)
        optimizer = torch.optim.RMSprop(work.parameters, lr=1e-6, momentum=0.9)
        step()
        optimizer.step()
        peak = torch.tensor([memory.peak])
    if world.all_ranks is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=world.all_ranks)
    return {"peak": int(peak), "parameters": sum(layer.parameters for layer in costs)}


@contextmanager
def _held_to(budget: int, device: torch.device) -> Iterator[_Allocator | _CountedTensors]:
    """Limits a device to so many bytes: by a GPU's own allocator, or by counting the tensors of a CPU."""
    if device.type == "cuda":
        yield _Allocator(budget, device)
        return
    with _CountedTensors(budget) as counted:
        yield counted


class _Allocator:
    """Limits a GPU's allocator to ``budget`` bytes."""

    def __init__(self, budget: int, device: torch.device) -> None:
        self._device = device
        whole = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / whole), device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))


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
