"""The engine and a plain loop over the same modules, driven without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.pipeline.boundary import as_tensors
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.engine import Loss, Part, Pipeline, StepPlan
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.schedule import schedule
from gpipe_cli.pipeline.transport import Transport

CPU = torch.device("cpu")
Step = Callable[[], None]


class Block(nn.Module):
    """x [b, t, width] to x + a feed-forward branch four times as wide: costs the same wherever it stands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))  # type: ignore[no-any-return]


def squared_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Sum of squared differences, and no statistics."""
    return F.mse_loss(outputs[0], targets[0], reduction="sum"), torch.zeros(0, dtype=torch.float64)


def engine_step(
    modules: Sequence[nn.Module],
    rank: int,
    workers: int,
    parts: Sequence[Part],
    kind: str = "gpipe",
    remat: str = "never",
    loss: Loss = squared_loss,
    cells_here: int = 1,
) -> Step:
    """One training step of this worker, whose cells ``modules`` make up in equal parts.

    Args:
        parts: micro-batches; every worker gives the same shapes, only the first one's values count.
        cells_here: cells of each worker; cell c lies on worker c mod W.
    """
    placement = tuple(range(workers)) * cells_here
    world = dist.group.WORLD
    transport = Transport(placement, CPU, CPU, (world, world), world) if workers > 1 and world is not None else None
    size = len(modules) // cells_here
    cells = []
    for part in range(cells_here):
        cell = part * workers + rank
        built = [BuiltLayer(cell * size + i, f"layer.{i}", modules[part * size + i]) for i in range(size)]
        cells.append(Cell(cell, built, NoiseSource(0, 0, CPU)))
    engine = Pipeline(cells, placement, transport, loss, len(parts[0][1]), CPU)
    program = schedule(kind, placement, len(parts), remat)[rank]
    signatures = tuple(tuple(tensor.shape for tensor in inputs + targets) for inputs, targets in parts)
    mine = parts if rank == 0 else None

    def step() -> None:
        engine.meter.begin_step()
        engine.train_step(program, StepPlan(0, 1, signatures, 1.0), mine)
        engine.meter.end_step()

    return step


def plain_step(modules: Sequence[nn.Module], parts: Sequence[Part], loss: Loss = squared_loss) -> Step:
    """Forward and backward of each micro-batch in turn: what anyone would write without an engine."""

    def step() -> None:
        for inputs, targets in parts:
            values = inputs if len(inputs) > 1 else inputs[0]
            for module in modules:
                values = module(values)
            loss(as_tensors(values), targets)[0].backward()  # type: ignore[no-untyped-call]  # torch's own annotation

    return step
