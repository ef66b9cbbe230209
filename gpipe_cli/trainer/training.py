"""Puts together what learns: optimizer, schedule, checkpoints and the loop, on top of the assembled pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ..checkpoint.choose import open_checkpoint
from ..checkpoint.commit import prepare_directory
from ..checkpoint.compatibility import fingerprint, require_same_steps
from ..checkpoint.files import CheckpointInfo, Json, shorten
from ..checkpoint.layer_state import load_layer, restore_layer
from ..checkpoint.lr_schedule_state import LRScheduleState
from ..checkpoint.transfer import load_weights, patterns_without_effect, require_same_model
from ..config import Settings
from ..distributed.exchange import Exchange
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_lr_schedule, build_optimizer
from ..launch.context import Context
from ..metrics.journal import Journal
from ..metrics.records import Progress
from ..metrics.step_report import StepReporter
from ..optim.average import WeightAverage
from ..pipeline.cell import Cell
from .assembly import Assembly, assemble_evaluator, evaluation_fields
from .loop import Parts, Trainer
from .saving import Saver
from .start_messages import batchnorm_notice


def assemble_training(
    context: Context,
    config: Mapping[str, Any],
    assembly: Assembly,
    journal: Journal,
    resumed: CheckpointInfo | None,
) -> Trainer:
    """The trainer, at its beginning or where ``resumed`` left off; every worker calls it at the same time.

    Args:
        config: with the resolved configuration under "settings", for the checkpoints.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
    """
    settings, world, cells = assembly.settings, assembly.world, assembly.cells
    names = layers_that_count_on_steps(world, cells)
    if names and settings.trainer.steps is None:
        raise ConfigurationError(
            f"trainer.steps=null, but their number decides what these layers do (begin_step): {shorten(names)}: set "
            "trainer.steps; trainer.epochs and trainer.seconds may end the run before"
        )
    if resumed is not None:
        require_same_steps(resumed, config["settings"], settings.checkpoint.allow_changes, names)
    elif settings.checkpoint.init_from is not None:
        transfer(settings, world, cells, assembly.layers, journal)
    average = None if settings.trainer.average is None else WeightAverage(cells, settings.trainer.average)
    optimizer = build_optimizer(settings.optimizer, [parameter for cell in cells for _, parameter in cell.parameters()])
    lr_schedule = build_lr_schedule(settings.lr_schedule, optimizer)
    schedule = LRScheduleState(lr_schedule, optimizer)
    # The schedule counts steps, also one whose update is skipped; torch warns when that happens to the very first.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    saver = Saver(
        context.run_dir,
        world,
        cells,
        assembly.layers,
        settings.checkpoint.keep,
        config["settings"],
        fingerprint(assembly.source),
        optimizer,
        schedule,
        average,
        journal.warn,
    )
    reporter = make_reporter(assembly)
    fields = {**assembly.codec.fields(), **reporter.fields(), **saver.fields(), **evaluation_fields(assembly)}
    exchange = Exchange(fields, world.all_ranks)
    parts = Parts(
        assembly=assembly,
        exchange=exchange,
        reporter=reporter,
        optimizer=optimizer,
        average=average,
        lr_schedule=lr_schedule,
        evaluator=assemble_evaluator(assembly, exchange, context.stop_requested),
        saver=saver,
        journal=journal,
        stop_requested=context.stop_requested,
        where=context.where,
    )
    progress, position = Progress(), None
    if world.rank == 0:
        for warning in prepare_directory(context.run_dir, resumed):
            journal.warn(warning)
    if resumed is not None:
        progress, position = restore(resumed, cells, optimizer, average)
        journal.message(f"going on from {resumed.path}, step {resumed.step}")
        restore_schedule(resumed, schedule, config["settings"])
    say_batchnorm(journal, world, cells, settings, assembly.survey.examples)
    return Trainer(parts, progress, position)


def layers_that_count_on_steps(world: World, cells: Sequence[Cell]) -> list[str]:
    """Names of the model's layers that are told the number of steps, but for those that say they make nothing of it."""
    mine = [
        layer.name
        for cell in cells
        for layer in cell.layers
        if any(hasattr(m, "begin_step") and getattr(m, "depends_on_steps", True) for m in layer.module.modules())
    ]
    everyone = world.all_gather(mine)
    return [name for worker in everyone[: world.workers] for name in worker]


def make_reporter(assembly: Assembly) -> StepReporter:
    """Writes and reads the report that ends each step."""
    pipeline, world = assembly.settings.pipeline, assembly.world
    return StepReporter(
        assembly.losses,
        pipeline.K,
        pipeline.M,
        world.replicas,
        world.size,
        len(assembly.parameter_names),
        len(assembly.task.statistics),
    )


def transfer(
    settings: Settings, world: World, cells: Sequence[Cell], model: Mapping[str, Sequence[str]], journal: Journal
) -> None:
    """Weights and buffers from `checkpoint.init_from`, on every worker those of its layers; says what begins anew."""
    wanted = settings.checkpoint
    info = open_checkpoint(Path(cast(str, wanted.init_from)))
    require_same_model(info, model, wanted.init_except)
    for pattern in patterns_without_effect(info, model, wanted.init_except):
        journal.warn(f"checkpoint.init_except: {pattern} is no layer or parameter of this model or of {info.path}")
    new = world.all_gather(load_weights(info, cells, wanted.init_except, wanted.init_average))
    names = [name for worker in new[: world.workers] for name in worker]
    journal.message(f"weights from {info.path}; begun anew: {', '.join(sorted(names)) or 'nothing'}")


def restore(
    info: CheckpointInfo,
    cells: Sequence[Cell],
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
) -> tuple[Progress, Any]:
    """Weights and their average, optimizer and progress from a checkpoint.

    Returns:
        Progress and data position.
    """
    for cell in cells:
        for layer in cell.layers:
            state = load_layer(info, layer.name)
            restore_layer(layer.name, layer.module, optimizer, state)
            if average is not None:
                average.restore(layer.name, state.averages)
    scalars: dict[str, Any] = {key: value for key, value in info.state.scalars.items() if value is not None}
    return Progress(step=info.step, **scalars), info.state.data_position


def restore_schedule(info: CheckpointInfo, schedule: LRScheduleState, settings: Mapping[str, Json]) -> None:
    """As the checkpoint has it, or, where `checkpoint.allow_changes` let it be changed, as the configuration has it."""
    saved = info.state.configuration
    if all(saved.get(section) == settings.get(section) for section in ("optimizer", "lr_schedule")):
        schedule.restore(cast("Mapping[str, Json]", info.state.schedule))
    else:
        schedule.replay(info.step)


def say_batchnorm(journal: Journal, world: World, cells: Sequence[Cell], settings: Settings, examples: int) -> None:
    """``examples`` are those of replica 0; the mini-batch is `data.batch_size` where examples are counted."""
    everyone = world.all_gather(sum(len(cell.batchnorms) for cell in cells))
    size, by_tokens = settings.data.get("batch_size"), settings.data.get("batch_tokens") is not None
    mini_batch = size if isinstance(size, int) and not by_tokens else examples * world.replicas
    pipeline = settings.pipeline
    layers, together = sum(everyone[: world.workers]), pipeline.sync_batchnorm
    notice = batchnorm_notice(layers, mini_batch, pipeline.M, pipeline.replicas, together)
    if notice is not None:
        journal.message(notice.text)
    if notice is not None and notice.warning is not None:
        journal.warn(notice.warning)
