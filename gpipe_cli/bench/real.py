"""The engine's step with layers that compute: for table 2 where there are K devices, and for table 1's real steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.distributed.world import World
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.transport import connect_workers

from .driver import EngineStep, step_of_cells

SEED = 1  # of the weights


def cross_entropy_sum(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    """Of logits [b, classes] or [b, T, tokens]; no statistics."""
    logits, wanted = outputs[0], targets[0]
    loss = F.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten(), reduction="sum")
    return loss, torch.zeros(0, dtype=torch.float64)


def real_step(
    builders: Sequence[LayerBuilder],
    sizes: Sequence[int],
    world: World,
    examples: tuple[Tensor, Tensor],
    M: int,
    kind: str,
    remat: str,
) -> EngineStep:
    """A training step of this worker, one cell a worker (interleaved schedules: cells go round the workers).

    Args:
        sizes: layers of each cell.
        examples: inputs and targets of the mini-batch; every worker gives the same shapes.
    """
    placement = tuple(cell % world.workers for cell in range(len(sizes)))
    cells = []
    for number, (worker, layers) in enumerate(zip(placement, cell_layers(sizes), strict=True)):
        if worker == world.worker:
            built = [BuiltLayer(i, builders[i].name, build_layer(builders[i], i, SEED, world.device)) for i in layers]
            cells.append(Cell(number, built, NoiseSource(1, 0, world.device)))
            cells[-1].train(True)
    transport = None
    if world.message_groups is not None and world.all_ranks is not None:
        groups = world.message_groups, world.all_ranks
        transport = connect_workers(placement, world.device, world.wire, *groups, world.shared_memory)
    micro_batches: list[MicroBatch] = [
        ((x,), (y,)) for x, y in zip(*(tensor.tensor_split(M) for tensor in examples), strict=True)
    ]
    scale = 1.0 / len(examples[0])
    return step_of_cells(
        cells, placement, world.worker, transport, micro_batches, kind, remat, cross_entropy_sum, scale, world.device
    )


def parameters_of(step: EngineStep) -> list[torch.nn.Parameter]:
    return [parameter for cell in step.engine.cells.values() for _, parameter in cell.parameters()]
