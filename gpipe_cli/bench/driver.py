"""The engine and a plain loop over the same modules, driven without a trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.pipeline.boundary import as_argument, as_tensors
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.engine import Loss, Pipeline, StepInput
from gpipe_cli.pipeline.halves import backward_of_inputs
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.transport import Transport, connect_workers
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.schedule.schedule import schedule

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


def squared_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


def squared_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Sum of squared differences, and no statistics."""
    return squared_sum(outputs[0], targets[0]), torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class EngineStep:
    """One training step of this worker, to be called again and again; ``engine.meter`` knows where it went."""

    engine: Pipeline
    instructions: Sequence[Instruction]
    plan: StepInput
    micro_batches: Sequence[MicroBatch] | None

    def __call__(self) -> None:
        self.engine.meter.begin_step()
        self.engine.train_step(self.instructions, self.plan, self.micro_batches)
        self.engine.meter.end_step()


def engine_step(
    modules: Sequence[nn.Module],
    rank: int,
    workers: int,
    micro_batches: Sequence[MicroBatch],
    kind: str = "gpipe",
    remat: str = "never",
    loss: Loss = squared_loss,
    cells_here: int = 1,
    shared_memory: bool = True,
) -> EngineStep:
    """One training step of this worker, whose cells ``modules`` make up in equal micro_batches.

    Args:
        micro_batches: micro-batches; every worker gives the same shapes, only the first one's values count.
        cells_here: cells of each worker; cell c lies on worker c mod W.
        shared_memory: as of `connect_workers`.
    """
    placement = tuple(range(workers)) * cells_here
    size = len(modules) // cells_here
    cells = []
    for part in range(cells_here):
        cell = part * workers + rank
        built = [BuiltLayer(cell * size + i, f"layer.{i}", modules[part * size + i]) for i in range(size)]
        cells.append(Cell(cell, built, NoiseSource(0, 0, CPU)))
    transport = cpu_transport(placement, shared_memory)
    return step_of_cells(cells, placement, rank, transport, micro_batches, kind, remat, loss)


def step_of_cells(
    cells: Sequence[Cell],
    placement: tuple[int, ...],
    worker: int,
    transport: Transport | None,
    micro_batches: Sequence[MicroBatch],
    kind: str,
    remat: str,
    loss: Loss = squared_loss,
    scale: float = 1.0,
    device: torch.device = CPU,
) -> EngineStep:
    """One training step of one worker with these ``cells``.

    Args:
        placement: worker of every cell.
        micro_batches: micro-batches; every worker gives the same shapes, only the first one's values count.
        scale: 1 / weight of the mini-batch.
    """
    engine = Pipeline(cells, placement, transport, loss, len(micro_batches[0][1]), device)
    instructions = schedule(kind, placement, len(micro_batches), remat)[worker]
    signatures = tuple(tuple(tensor.shape for tensor in inputs + targets) for inputs, targets in micro_batches)
    return EngineStep(engine, instructions, StepInput(0, 1, signatures, scale), micro_batches if worker == 0 else None)


def cpu_transport(placement: tuple[int, ...], shared_memory: bool = True) -> Transport | None:
    """To the other workers of the process group; None when there are none."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    return connect_workers(placement, CPU, CPU, (world, world), world, shared_memory)


def plain_step(
    modules: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], loss: Loss = squared_loss, kind: str = "1f1b"
) -> Step:
    """What anyone would write without an engine, in the order that a schedule has on a single worker.

    Args:
        kind: "1f1b": forward and backward of each micro-batch in turn, with one graph at a time; "gpipe": all forwards,
            then all backwards, the last micro-batch first.
    """

    def step() -> None:
        if kind == "gpipe":
            losses = [_forward(modules, part, loss) for part in micro_batches]
            while losses:
                losses.pop().backward()  # type: ignore[no-untyped-call]  # torch's own annotation
            return
        for part in micro_batches:
            _forward(modules, part, loss).backward()  # type: ignore[no-untyped-call]  # torch's own annotation

    return step


def _forward(modules: Sequence[nn.Module], part: MicroBatch, loss: Loss) -> Tensor:
    """The loss of one micro-batch."""
    inputs, targets = part
    values = as_argument(inputs)
    for module in modules:
        values = module(values)
    return loss(as_tensors(values), targets)[0]


@dataclass(frozen=True)
class HalvesStep:
    """A plain loop whose backwards are in two halves, with a clock beside it.

    Attributes:
        seconds: of all micro-batches of the latest step, by kind of work.
    """

    modules: Sequence[nn.Module]
    micro_batches: Sequence[MicroBatch]
    loss: Loss = squared_loss
    seconds: dict[Op, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self) -> None:
        self.seconds.clear()
        for part in self.micro_batches:
            start = time.perf_counter()
            loss = _forward(self.modules, part, self.loss)
            scored = time.perf_counter()
            weights = backward_of_inputs([loss], [torch.ones_like(loss)], part[0])
            handed_back = time.perf_counter()
            weights.run()
            self.seconds[Op.FORWARD] += scored - start
            self.seconds[Op.INPUT_GRADIENT] += handed_back - scored
            self.seconds[Op.WEIGHT_GRADIENT] += time.perf_counter() - handed_back
