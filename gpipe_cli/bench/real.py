"""The paper's models with layers that compute: for table 2 where there are K devices, and for table 1's real steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.boundary import Tensors
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Part
from gpipe_cli.pipeline.partition import cell_layers
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.transport import Transport
from gpipe_cli.trainer.world import World, join_world

from .driver import EngineStep, step_of_cells
from .models import build_layers, random_examples
from .profiles import Model
from .stopwatch import StopWatch

LEARNING_RATE = 1e-6  # of plain SGD: the weights of a measurement should stay finite, nothing else


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
            built = [BuiltLayer(i, builders[i].name, build_layer(builders[i], i, 1, world.device)) for i in layers]
            cells.append(Cell(number, built, NoiseSource(1, 0, world.device)))
            cells[-1].train(True)
    transport = None
    if world.directions is not None and world.everyone is not None:
        groups = world.directions, world.everyone
        transport = Transport(placement, world.device, world.wire, *groups, world.shared_memory)
    parts: list[Part] = [((x,), (y,)) for x, y in zip(*(tensor.tensor_split(M) for tensor in examples), strict=True)]
    scale = 1.0 / len(examples[0])
    return step_of_cells(
        cells, placement, world.worker, transport, parts, kind, remat, cross_entropy_sum, scale, world.device
    )


def parameters_of(step: EngineStep) -> list[torch.nn.Parameter]:
    return [parameter for cell in step.engine.cells.values() for _, parameter in cell.parameters()]


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point, the form of `throughput.worker`: for each setting the median seconds of each schedule's step.

    A step is forward, backward and an update by plain SGD.
    """
    world = join_world(context, context.world_size, 1, "auto", "auto")
    watch = StopWatch(world.rank, world.size)
    found = []
    for setting in config["settings"]:
        model = Model(setting["family"], tuple(setting["sizes"]), setting["small"])
        seconds = {
            kind: _median_seconds(model, setting, kind, config["repetitions"], world, watch)
            for kind in setting["contenders"]
        }
        found.append({"seconds": seconds, "link": None})
    return found


def _median_seconds(
    model: Model, setting: dict[str, Any], kind: str, repetitions: int, world: World, watch: StopWatch
) -> float:
    cells = 2 * world.workers if kind.startswith("interleaved") else world.workers
    examples = random_examples(model, setting["examples"])
    sizes = setting["cuts"][str(cells)]
    step = real_step(build_layers(model), sizes, world, examples, setting["M"], kind, setting["remat"])
    optimizer = torch.optim.SGD(parameters_of(step), lr=LEARNING_RATE)

    def whole_step() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    return statistics.median([watch.time(whole_step) for _ in range(repetitions + 1)][1:])
