"""Measures what a planned run really allocates, with the engine on real workers and tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.config import Settings
from gpipe_cli.distributed.pipeline import WorkerPipeline
from gpipe_cli.distributed.step_message import BatchShape
from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.factory.build import boundary_type_of, build_autocast, build_model, build_optimizer, build_task
from gpipe_cli.factory.example import example_micro_batch, with_example
from gpipe_cli.factory.groups import Groups
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.optim.average import WeightAverage
from gpipe_cli.partition.cut import cut_model
from gpipe_cli.partition.tracking import Tracker
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.step import StepPlan

CPU = torch.device("cpu")


def measure(context: Context, config: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns for each configuration and each worker the bytes of each kind; the entry point of a worker."""
    world = join_world(context, context.world_size, 1, "cpu", "auto")
    runs = (one_run(Settings.from_config(values), world) for values in config["settings"])
    return [cast("list[dict[str, Any]]", world.all_gather(run)) for run in runs]


def one_run(settings: Settings, world: World) -> dict[str, Any]:
    """Runs two steps: the first learns the boundaries, the second is counted."""
    pipeline, task = settings.pipeline, build_task(settings.task)
    micro_batch, _ = example_micro_batch(settings, pipeline.M, False)
    builders = build_model(with_example(settings, micro_batch[0]))
    cut = cut_model(builders, pipeline, world.workers, micro_batch)
    shape, autocast = BatchShape.of(micro_batch), build_autocast(settings.precision, CPU)
    between = boundary_type_of(settings.precision)
    whole = WorkerPipeline(builders, cut, pipeline, task, shape, world, settings.seed, autocast, between)
    cells, ties, engine = whole.cells, whole.ties, whole.engine
    ties.spread()
    instructions = whole.schedule.lists(pipeline.M)[world.worker]
    first = cut.placement[0] == world.worker
    plan = StepPlan((("train",),) * pipeline.M, 1.0, steps=1)
    given = [real(micro_batch) for _ in range(pipeline.M)] if first else None
    engine.train_step(instructions, replace(plan, micro_batches=given))
    del given
    parameters = [p for cell in cells for _, p in cell.parameters()]
    held = {p.data_ptr(): p for p in (*parameters, *ties.users)}
    buffers = [b for cell in cells for layer in cell.layers for b in layer.module.buffers()]
    members = Groups(settings.optimizer).divided(pair for cell in cells for pair in cell.parameters())
    optimizer = build_optimizer(settings.optimizer, members)
    optimizer.step()
    if world.size > 1:
        dist.barrier()
    gradients = [p.grad for p in (*parameters, *ties.users) if p.grad is not None]
    tracker = Tracker()
    tracker.ignore([*held.values(), *buffers, *gradients])
    with tracker:
        given = [real(micro_batch) for _ in range(pipeline.M)] if first else None
        engine.train_step(instructions, replace(plan, micro_batches=given))
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return {
        "weights": sum(map(size_of, [*held.values(), *buffers])),
        "gradients": sum(map(size_of, gradients)),
        "optimizer": sum(map(size_of, state)),
        "average": sum(map(size_of, averages_of(cells, settings.trainer.average))),
        "activations": tracker.peak,
    }


def averages_of(cells: Sequence[Cell], decay: float | None) -> list[Tensor]:
    """Returns the averages that the trainer keeps beside the weights."""
    if decay is None:
        return []
    average = WeightAverage(cells, decay)
    of_layers = (average.of(layer.name) for cell in cells for layer in cell.layers)
    return list({id(tensor): tensor for named in of_layers for tensor in named.values()}.values())


def real(micro_batch: MicroBatch) -> MicroBatch:
    """Returns tensors of these shapes; small numbers serve as tokens, labels and pixels."""
    inputs, targets = ([torch.randint(1, 9, t.shape).to(t.dtype) for t in side] for side in micro_batch)
    return tuple(inputs), tuple(targets)


def size_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
