"""Builds training steps to be measured, without a trainer: by the engine, and by a plain loop over the same layers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.micro_batch import Loss, MicroBatch, Tensors
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.engine import Engine
from gpipe_cli.pipeline.messages.boundary import as_argument, as_tensors
from gpipe_cli.pipeline.messages.shared_memory import SharedMemoryTransport
from gpipe_cli.pipeline.messages.transport import Transport
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.step import StepPlan
from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.schedule.schedule import kept_graphs, schedule

CPU = torch.device("cpu")
Step = Callable[[], None]
Autocast = Callable[[], AbstractContextManager[Any]]  # makes the context in which forward runs


def squared_loss(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    """Returns the sum of squares, and empty statistics."""
    return F.mse_loss(outputs[0], targets[0], reduction="sum"), torch.zeros(0, dtype=torch.float64)


def cpu_transport(placement: tuple[int, ...]) -> Transport | None:
    """Connects this worker to the others of the process group; returns None when there are none."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    return SharedMemoryTransport(placement, CPU, CPU, (world, world), world)


@dataclass(frozen=True)
class EngineStep:
    """Runs one training step of this worker whenever it is called; ``engine.meter`` has its times."""

    engine: Engine
    instructions: Sequence[Instruction]
    plan: StepPlan

    def __call__(self) -> None:
        self.engine.meter.begin_step()
        self.engine.train_step(self.instructions, self.plan)
        self.engine.meter.read_step()


def make_cell(number: int, modules: Sequence[nn.Module], first: int = 0) -> Cell:
    """Makes a cell of these layers; ``first`` is the place of its first layer in the model."""
    layers = [BuiltLayer(i, f"layer.{i}", module) for i, module in enumerate(modules, start=first)]
    return Cell(number, layers, NoiseSource(1, 0, CPU))


def engine_step(
    cells: Sequence[Cell],
    placement: tuple[int, ...],
    rank: int,
    transport: Transport | None,
    micro_batches: Sequence[MicroBatch],
    kind: str = "gpipe",
    remat: str | Sequence[int] = "never",
    loss: Loss = squared_loss,
    weight: float = 1.0,
    device: torch.device = CPU,
    autocast: Autocast = nullcontext,
) -> EngineStep:
    """Builds the engine's step from this worker's cells.

    Args:
        placement: worker of every cell.
        remat: a policy, as `kept_graphs` takes it.
        micro_batches: every worker passes the same shapes; only the first worker's values count.
        weight: the mini-batch's, which divides every loss.
    """
    engine = Engine(cells, placement, transport, loss, len(micro_batches[0][1]), device, autocast)
    M = len(micro_batches)
    instructions = schedule(kind, placement, M, kept_graphs(remat, len(placement), M))[rank]
    shapes = tuple(tuple(tensor.shape for tensor in inputs + targets) for inputs, targets in micro_batches)
    plan = StepPlan(shapes, weight, steps=1, micro_batches=micro_batches if rank == 0 else None)
    return EngineStep(engine, instructions, plan)


def plain_step(
    modules: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Loss = squared_loss,
    autocast: Autocast = nullcontext,
) -> Step:
    """Builds a training step without an engine: forward and backward of each micro-batch in turn."""

    def step() -> None:
        for inputs, targets in micro_batches:
            values: Tensor | Tensors = as_argument(inputs)
            with autocast():
                for module in modules:
                    values = module(values)
                loss(as_tensors(values), targets)[0].backward()  # type: ignore[no-untyped-call]  # torch's own

    return step
