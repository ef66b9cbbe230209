"""Trains two replicas with shared BatchNorm statistics, and one model with the joined micro-batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from amoebanet_jobs import CLASSES, SMALL, descend
from small_models import CPU, build_all
from torch import Tensor

from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import Engine, StepInput
from gpipe_cli.pipeline.gradients import reduce_over_replicas
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.tasks.classification import ClassificationTask

M, EXAMPLES, STEPS = 2, 11, 2  # micro-batches of 3, 3, 3 and 2 images


def micro_batches(step: int) -> list[MicroBatch]:
    """Returns the micro-batches of both replicas: the first M are replica 0's."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(EXAMPLES, 3, 32, 32, generator=generator)
    labels = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    pairs = zip(images.tensor_split(2 * M), labels.tensor_split(2 * M), strict=True)
    return [((some,), (theirs,)) for some, theirs in pairs]


def joined(step: int) -> list[MicroBatch]:
    """Returns micro-batch m of both replicas, joined."""
    every = micro_batches(step)
    both = [zip(every[m], every[M + m], strict=True) for m in range(M)]
    return [
        tuple(tuple(torch.cat(pair) for pair in zip(one, other, strict=True)) for one, other in halves)  # type: ignore[misc]
        for halves in both
    ]


def train(replica: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Returns gradients and buffers by step and name; without a group those of the joined micro-batches."""
    layers = build_all(amoebanet(**SMALL, image_size=32, auxiliary_head=False))  # type: ignore[arg-type]
    cell = Cell(0, layers, NoiseSource(1, replica, CPU), group)
    engine = Engine([cell], (0,), None, ClassificationTask(0.1).loss, 1, CPU)
    held = dict(cell.parameters())
    seen = {}
    for step in range(STEPS):
        mine = joined(step) if group is None else micro_batches(step)[replica * M : (replica + 1) * M]
        step_input = StepInput(step, STEPS, tuple(len(inputs[0]) for inputs, _ in mine), 1 / EXAMPLES)
        engine.train_step(schedule("gpipe", (0,), M, "always")[0], step_input, mine)
        if group is not None:
            reduce_over_replicas(held.values(), group)
        finish_batchnorm(cell.batchnorms, group)
        for name, parameter in held.items():
            assert parameter.grad is not None
            seen[f"step {step}, gradient of {name}"] = parameter.grad.clone()
        for layer in layers:
            for name, value in layer.module.named_buffers():
                seen[f"step {step}, {layer.name}.{name}"] = value.clone()
        descend(list(held.values()))
    return seen


def compare(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of a worker: lists what differs from the joined mini-batch, in float64."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    context.init_process_group()
    found = train(context.rank, dist.group.WORLD)
    expected = train(0, None)
    wrong = [
        f"replica {context.rank}, {name} differs by {(value - expected[name]).abs().max().item():.2e}"
        for name, value in found.items()
        if not torch.allclose(value, expected[name], rtol=1e-7, atol=1e-10)
    ]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, wrong)
    return [text for worker in everyone for text in worker]
