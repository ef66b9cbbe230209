"""Runs one worker's part of table 1: a real training step, whose memory is counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.distributed.pipeline import make_transport
from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.partition import cell_layers, partition
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.planner.measure.tracking import Tracker

from ..gpus import GPU
from .steps import engine_step, make_cell, split

TOKENS, VOCABULARY = 64, 1000


def worker(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Runs one training step of a Transformer-L, with an update by RMSProp; ``config``: arguments of `attempt`."""
    return attempt(join_world(context, context.world_size, 1, "auto", "auto"), **config)


def attempt(world: World, L: int, width: int, texts: int, M: int, remat: str) -> dict[str, int]:
    """Runs one step of a model of this depth and d_model, on mini-batches of so many texts.

    Returns:
        ``peak``: the most bytes of tensors alive on any worker (weights, gradients, optimizer, activations, messages);
        ``parameters``: of the whole model.
    """
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (texts, TOKENS + 1))
    examples = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    builders = transformer_lm(L, 4 * width, width // 64, VOCABULARY, width)
    costs, device = layer_costs(builders, (examples[0][:1],), "flops"), world.device
    sizes = partition([layer.cost for layer in costs], world.workers, "min_max")
    with Tracker() as tracker:
        mine, placement = cell_layers(sizes)[world.worker], tuple(range(world.workers))
        modules = [build_layer(builders[i], i, 0, device) for i in mine]
        cell, transport = make_cell(world.worker, modules, mine.start, device), make_transport(world, placement)
        loss, micro_batches, scale = summed_cross_entropy, split(examples, M), 1 / texts
        step = engine_step(
            [cell], placement, world.worker, transport, micro_batches, "gpipe", remat, loss, scale, device
        )
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = torch.optim.RMSprop(parameters, lr=1e-6, momentum=0.9)
        step()
        optimizer.step()
    peak = torch.tensor([torch.cuda.max_memory_allocated(device) if device.type == GPU else tracker.peak])
    if world.all_ranks is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=world.all_ranks)
    return {"peak": int(peak), "parameters": sum(layer.parameters for layer in costs)}


def summed_cross_entropy(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(outputs[0].flatten(0, -2), targets[0].flatten(), reduction="sum")
    return loss, torch.zeros(0, dtype=torch.float64)
