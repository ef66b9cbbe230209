"""What every worker runs: puts the parts together, trains, and leaves a summary."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # every optimizer imports it when it is made; here it is imported once, before workers are forked

from .. import __version__
from ..config import Settings
from ..data.source import Source
from ..errors import ConfigurationError
from ..launch.context import Context
from ..layers import LayerBuilder
from ..pipeline.cell import Cell
from ..pipeline.engine import TASK, Pipeline
from ..pipeline.transport import Transport
from ..tasks.base import Task
from ..tasks.generation import GenerationSettings
from .average import WeightAverage
from .build import (
    Cut,
    build_autocast,
    build_cells,
    build_lr_schedule,
    build_model,
    build_optimizer,
    build_source,
    build_task,
    cut_model,
)
from .checkpoint import load_layer, restore_layer
from .checkpoint_commit import prepare_directory
from .checkpoint_files import CheckpointInfo, open_checkpoint
from .evaluation import Evaluator
from .exchange import Exchange
from .generation import Generator
from .journal import Journal
from .loop import Parts, Progress, Trainer
from .plan import Form, PlanCodec
from .predictions import PredictionKeeper
from .programs import Programs
from .saving import Saver, restore_lr_schedule
from .start_messages import batchnorm_notice
from .step_report import StepReporter
from .transfer import load_weights, patterns_without_effect, require_same_model
from .world import World, join_world


def main(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """One worker's life.

    Args:
        context: its place among the workers.
        config: the resolved configuration, plain values.

    Returns:
        The summary, as in summary.json.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
        LayerFailed: an exception in a layer.
        NonFinite: too many updates in a row were not finite.
    """
    settings = Settings.from_config(config["settings"])
    pipeline = settings.pipeline
    torch.set_num_threads(pipeline.threads)  # torchrun's workers have another number; bits depend on it
    workers = context.world_size // pipeline.replicas
    world = join_world(context, workers, pipeline.replicas, pipeline.device, pipeline.backend)
    resumed = None if settings.checkpoint.resume is None else open_checkpoint(Path(settings.checkpoint.resume))
    task = build_task(settings.task)
    journal = Journal(
        context.run_dir,
        context.emit,
        active=world.rank == 0,
        every=settings.logging.every,
        tensorboard=settings.logging.tensorboard,
        statistics=task.statistics,
        unit=task.unit,
        steps=settings.trainer.steps,
        resumed_step=resumed.step if resumed is not None else 0,
    )
    trainer, cut = assemble(context, config, settings, world, task, journal, resumed)
    trainer.run()
    summary = summarize(trainer, cut, settings, config)
    journal.summary(summary)
    journal.close()
    return summary


def assemble(
    context: Context,
    config: Mapping[str, Any],
    settings: Settings,
    world: World,
    task: Task,
    journal: Journal,
    resumed: CheckpointInfo | None,
) -> tuple[Trainer, Cut]:
    """Everything that the loop works with, from the configuration; every worker calls it at the same time."""
    builders = build_model(settings.model)
    source = open_source(settings, world, journal)
    form, cut, special, examples = cast(
        "tuple[Form, Cut, tuple[int, int], int]",
        world.tell_everyone(lambda: survey(builders, settings, world, cast(Source, source))),
    )
    journal.cells(cut.table)
    cells = build_cells(builders, cut, world, settings.seed, settings.pipeline.sync_batchnorm)
    for cell in cells:
        cell.train(True)
    model, names, own, losses = whole_model(world, cells)
    if resumed is None and settings.checkpoint.init_from is not None:
        transfer(settings, world, cells, model, journal)
    average = None if settings.trainer.average is None else WeightAverage(cells, settings.trainer.average)
    parameters = [parameter for cell in cells for _, parameter in cell.parameters()]
    optimizer = build_optimizer(settings.optimizer, parameters)
    lr_schedule = build_lr_schedule(settings.schedule, optimizer)
    M = settings.pipeline.M
    programs = Programs(settings.pipeline.schedule, cut.placement, settings.pipeline.remat)
    engine = Pipeline(
        cells,
        cut.placement,
        make_transport(world, cut),
        task.loss,
        len(form.targets),
        world.device,
        build_autocast(settings.precision, world.device),
        context.where,
    )
    keep = settings.checkpoint.keep
    saver = Saver(context.run_dir, world, cells, model, keep, config["settings"], optimizer, lr_schedule, average)
    codec = PlanCodec(form, M, world.replica, world.replicas)
    reporter = StepReporter(
        losses, settings.pipeline.K, M, world.replicas, world.size, len(names), len(task.statistics)
    )
    generation: GenerationSettings | None = getattr(task, "generation", None)
    generation_fields = {} if generation is None else Generator.fields(world.replicas, M, generation)
    metrics = {"metrics": world.replicas * len(task.metrics), "stop": 1}
    fields = {**codec.fields(), **reporter.fields(), **saver.fields(), **metrics, **generation_fields}
    exchange = Exchange(fields, world.everyone)
    generator = None
    if generation is not None:
        generator = Generator(
            world,
            cast(Any, source),
            cast(Any, task),
            engine,
            programs,
            exchange,
            codec,
            M,
            generation,
            settings.trainer.samples,
            *special,
        )
    keeper = PredictionKeeper(world, cast(Any, task), source) if hasattr(task, "predictions") else None
    evaluator = Evaluator(world, source, task, cells, engine, programs, exchange, codec, M, generator, keeper)
    parts = Parts(
        settings, world, source, task, cells, names, own, engine, programs, exchange, codec, reporter,
        optimizer, average, lr_schedule, evaluator, saver, journal, context.stop_requested, context.where,
    )  # fmt: skip
    progress, position = Progress(), None
    if world.rank == 0:
        prepare_directory(context.run_dir, resumed)
    if resumed is not None:
        progress, position = restore(resumed, cells, optimizer, lr_schedule, average)
        journal.message(f"going on from {resumed.path}, step {resumed.step}")
    say_batchnorm(journal, world, cells, settings, examples)
    return Trainer(parts, progress, position), cut


def open_source(settings: Settings, world: World, journal: Journal) -> Source | None:
    """The data source on the workers that read it; rank 0 prepares it first, the others find it prepared."""
    source = build_source(settings.data) if world.reads_data else None
    if source is not None and settings.trainer.epochs is not None and not hasattr(source, "epoch"):
        raise ConfigurationError(
            f"trainer.epochs={settings.trainer.epochs} but data._target_={settings.data['_target_']} has no method "
            "epoch(position), so nobody knows when one has passed: use trainer.steps"
        )
    prepare = getattr(source, "prepare", None)
    world.tell_everyone(lambda: prepare(journal.preparation) if prepare is not None else None)
    if world.rank != 0 and prepare is not None:
        prepare(lambda text, done, total: None)
    return source


def survey(
    builders: Sequence[LayerBuilder], settings: Settings, world: World, source: Source
) -> tuple[Form, Cut, tuple[int, int], int]:
    """What rank 0 finds out for all from the first mini-batch.

    Returns:
        The form of the data; the cut of the model; where sentences begin and end; examples of replica 0's share.
    """
    batches = source.train(None, settings.pipeline.M, 0, world.replicas)
    parts = next(iter(batches)).parts
    part = parts[0]
    if hasattr(batches, "close"):
        batches.close()
    cut = cut_model(builders, settings.pipeline, world.workers, part, world.device)
    special = int(getattr(source, "bos_id", 0)), int(getattr(source, "eos_id", 0))
    return Form.of(part), cut, special, sum(len(inputs[0]) for inputs, _ in parts)


def whole_model(world: World, cells: Sequence[Cell]) -> tuple[dict[str, list[str]], list[str], list[int], list[int]]:
    """What all workers together hold.

    Returns:
        Parameter names by layer; all full names in layer order; the places of this worker's parameters among them; the
        indices of the layers with an auxiliary loss, and last `TASK`.
    """
    mine = [
        (
            layer.index,
            layer.name,
            [name for name, _ in layer.module.named_parameters()],
            hasattr(layer.module, "auxiliary_loss"),
        )
        for cell in cells
        for layer in cell.layers
    ]
    everyone = cast("list[list[tuple[int, str, list[str], bool]]]", world.gather_everyone(mine))
    layers = sorted(layer for worker in everyone[: world.workers] for layer in worker)
    model = {name: parameters for _, name, parameters, _ in layers}
    losses = [index for index, _, _, has_loss in layers if has_loss] + [TASK]
    names = [f"{layer}.{parameter}" for layer, parameters in model.items() for parameter in parameters]
    place = {name: number for number, name in enumerate(names)}
    return model, names, [place[name] for cell in cells for name, _ in cell.parameters()], losses


def make_transport(world: World, cut: Cut) -> Transport | None:
    """None where all cells live on one worker."""
    if world.workers == 1 or world.directions is None or world.everyone is None:
        return None
    ranks = tuple(world.rank_of(worker) for worker in cut.placement)
    return Transport(ranks, world.device, world.wire, world.directions, world.everyone)


def transfer(
    settings: Settings, world: World, cells: Sequence[Cell], model: Mapping[str, Sequence[str]], journal: Journal
) -> None:
    """Weights and buffers from `checkpoint.init_from`, on every worker those of its layers; says what begins anew."""
    wanted = settings.checkpoint
    info = open_checkpoint(Path(cast(str, wanted.init_from)))
    require_same_model(info, model, wanted.init_except)
    for pattern in patterns_without_effect(info, model, wanted.init_except):
        journal.warn(f"checkpoint.init_except: {pattern} is no layer or parameter of this model or of {info.path}")
    new = world.gather_everyone(load_weights(info, cells, wanted.init_except, wanted.init_average))
    names = [name for worker in cast("list[list[str]]", new[: world.workers]) for name in worker]
    journal.message(f"weights from {info.path}; begun anew: {', '.join(sorted(names)) or 'nothing'}")


def restore(
    info: CheckpointInfo,
    cells: Sequence[Cell],
    optimizer: torch.optim.Optimizer,
    lr_schedule: torch.optim.lr_scheduler.LRScheduler,
    average: WeightAverage | None,
) -> tuple[Progress, Any]:
    """Weights and their average, optimizer, schedule and progress from a checkpoint.

    Returns:
        Progress and data position.
    """
    for cell in cells:
        for layer in cell.layers:
            state = load_layer(info, layer.name)
            restore_layer(layer.name, layer.module, optimizer, state)
            if average is not None:
                average.restore(layer.name, state.averages)
    restore_lr_schedule(lr_schedule, optimizer, cast("Mapping[str, Any]", info.state.schedule))
    scalars: dict[str, Any] = {key: value for key, value in info.state.scalars.items() if value is not None}
    return Progress(step=info.step, **scalars), info.state.data_position


def say_batchnorm(journal: Journal, world: World, cells: Sequence[Cell], settings: Settings, examples: int) -> None:
    """``examples`` are those of replica 0; the mini-batch is `data.batch_size` where examples are counted."""
    everyone = cast("list[int]", world.gather_everyone(sum(len(cell.batchnorms) for cell in cells)))
    size, by_tokens = settings.data.get("batch_size"), settings.data.get("batch_tokens") is not None
    mini_batch = size if isinstance(size, int) and not by_tokens else examples * world.replicas
    pipeline = settings.pipeline
    layers, together = sum(everyone[: world.workers]), pipeline.sync_batchnorm
    notice = batchnorm_notice(layers, mini_batch, pipeline.M, pipeline.replicas, together)
    if notice is not None:
        journal.message(notice.text)
    if notice is not None and notice.warning is not None:
        journal.warn(notice.warning)


def summarize(trainer: Trainer, cut: Cut, settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """summary.json: final figures, times, the cells, versions."""
    progress, totals = trainer.progress, trainer.totals
    now = time.time()
    started = float(config.get("started_at", now))
    return {
        "steps": progress.step,
        "loss": progress.loss,
        "stopped_by": progress.stopped_by,
        "skipped_updates": progress.skipped,
        "evaluation": trainer.last_evaluation,
        "wall_seconds": now - started,
        "first_step_seconds": totals.first_step_at - started if totals.first_step_at else None,
        "examples_per_second": totals.examples_per_second,
        "bubble": totals.bubble,
        "bubble_predicted": totals.predicted_bubble(trainer.parts.programs),
        "K": settings.pipeline.K,
        "M": settings.pipeline.M,
        "workers": trainer.parts.world.workers,
        "replicas": trainer.parts.world.replicas,
        "cells": totals.with_times(cut.table),
        "parameters": cut.parameters,
        "peak_memory_bytes": totals.peak_memory,
        "device": str(trainer.parts.world.device.type),
        "versions": {"gpipe_cli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
