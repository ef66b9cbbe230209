"""Assembles the trainer on top of the pipeline: optimizer, learning rate schedule, checkpoints, reports, loop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.choose import advice, older
from ..checkpoint.commit import prepare_directory
from ..checkpoint.compatibility import fingerprint, require_compatible, require_same_data, vocabularies
from ..checkpoint.files import CheckpointError, CheckpointInfo, DamagedFile, RunState, shorten
from ..checkpoint.writer import CheckpointWriter
from ..distributed.exchange import Exchange
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_lr_schedule, build_optimizer
from ..launch.context import Context
from ..metrics.journal import Notices
from ..metrics.records import Progress
from ..metrics.step_report import StepReporter
from ..optim.average import WeightAverage
from ..optim.sharding import OptimizerShards
from ..pipeline.cell import Cell
from .assembly import Assembly, assemble_evaluator
from .batches import TrainingBatches
from .evaluator import evaluation_fields
from .initial_weights import begin_with_weights
from .loop import Trainer
from .nonfinite import begin_scale
from .saving import Saver
from .update import Updater


def assemble_training(
    context: Context,
    config: Mapping[str, Any],
    assembly: Assembly,
    journal: Notices,
    resumed: CheckpointInfo | None,
) -> Trainer:
    """Makes the trainer, at its beginning or where ``resumed`` left off; every worker calls it at the same time.

    Args:
        config: with the resolved configuration under "settings", for the checkpoints.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
    """
    settings, world, cells, task = assembly.settings, assembly.world, assembly.cells, assembly.task
    _check_steps(config, assembly, resumed)
    if resumed is None and settings.checkpoint.init_from is not None:
        begin_with_weights(assembly, journal)
    updater = make_updater(assembly)
    if resumed is not None:
        with context.where.doing("reading the checkpoint"):
            resumed = restore(config, assembly, updater, journal, resumed)
    saver = make_saver(context, config, assembly, updater, journal, resumed)
    pipeline, layout = assembly.pipeline, assembly.layout
    reporter = StepReporter(pipeline, layout.losses, len(layout.parameter_names), len(task.statistics))
    fields = {**pipeline.codec.fields(), **reporter.fields(), **saver.fields()}
    fields |= evaluation_fields(world.replicas, task)
    exchange = Exchange(fields, world.all_ranks)
    if world.rank == 0:
        prepare_directory(context.run_dir, resumed)
    progress, position = Progress(), None
    if resumed is not None:
        scalars: dict[str, Any] = {key: value for key, value in resumed.state.scalars.items() if value is not None}
        progress, position = Progress(step=resumed.step, **scalars), resumed.state.data_position
        journal.message(f"continuing from {resumed.path}, step {resumed.step}")
    for cell in cells:
        cell.guard_buffers()
    pipeline.ties.spread()
    begin_scale(progress, settings.precision.loss_scale)
    warn_of_single_examples(assembly, journal)
    return Trainer(
        assembly=assembly,
        exchange=exchange,
        batches=TrainingBatches(settings.trainer, pipeline, assembly.source, position, context.stop_requested),
        updater=updater,
        evaluator=assemble_evaluator(assembly, exchange, context.stop_requested),
        saver=saver,
        reporter=reporter,
        journal=journal,
        progress=progress,
    )


def _check_steps(config: Mapping[str, Any], assembly: Assembly, resumed: CheckpointInfo | None) -> None:
    """Refuses an unknown or, in a resumed run, another number of steps where layers depend on it."""
    settings, names = assembly.settings, layers_that_depend_on_steps(assembly.world, assembly.cells)
    if names and settings.trainer.steps is None:
        raise ConfigurationError(
            f"trainer.steps=null, but their number decides what these layers do (begin_step): {shorten(names)}: set "
            "trainer.steps; trainer.epochs and trainer.seconds may end the run before"
        )
    if names and resumed is not None:
        require_compatible(resumed, config["settings"], settings.checkpoint.allow_changes, names)


def restore(
    config: Mapping[str, Any], assembly: Assembly, updater: Updater, journal: Notices, resumed: CheckpointInfo
) -> CheckpointInfo:
    """Restores weights, optimizer and learning rate; returns the checkpoint. Every worker calls it at the same time.

    Where a worker finds a damaged file, all take the newest older checkpoint, if `checkpoint.resume` names none.
    """
    settings, damage = config["settings"], None
    saved: Mapping[str, Any] = resumed.state.configuration
    before, now = (tree["optimizer"]["_target_"] for tree in (saved, settings))
    try:
        updater.restore_layers(resumed, keep_memory=before == now)
    except DamagedFile as error:
        damage = str(error)
    damages = [text for text in assembly.world.all_gather(damage) if text is not None]
    if damages:
        other = older(resumed) if config.get("may_take_older") else None
        if other is None:
            raise CheckpointError(f"{damages[0]}. {advice(resumed.path)}")
        journal.warn(f"{damages[0]}; using {other.path.name}")
        allowed = assembly.settings.checkpoint.allow_changes
        require_compatible(other, settings, allowed)
        _check_steps(config, assembly, other)
        if assembly.world.rank == 0:
            require_same_data(other, assembly.source, allowed)
        return restore(config, assembly, updater, journal, other)
    if before != now:
        journal.warn(f"optimizer._target_ was {before} in the checkpoint: {now} begins without memory")
    updater.restore_lr(resumed, settings)
    return resumed


def layers_that_depend_on_steps(world: World, cells: Sequence[Cell]) -> list[str]:
    """Returns the names of the model's layers with a `begin_step`, except those whose `depends_on_steps` is False."""
    own = [
        layer.name
        for cell in cells
        for layer in cell.layers
        if any(hasattr(m, "begin_step") and getattr(m, "depends_on_steps", True) for m in layer.module.modules())
    ]
    return list(world.gather_from_workers(own))


def make_updater(assembly: Assembly) -> Updater:
    """Makes optimizer, learning rate schedule and weight average of this worker's cells."""
    settings = assembly.settings
    world, group, parameters = assembly.world, assembly.world.replica_group, assembly.pipeline.parameters()
    average = None if settings.trainer.average is None else WeightAverage(assembly.cells, settings.trainer.average)
    shards = None
    if settings.pipeline.shard_optimizer and group is not None:
        replicas = slice(world.worker, None, world.workers)  # of all ranks, those with these layers
        shards = OptimizerShards(parameters, group, lambda value: world.all_gather(value)[replicas])
    own = parameters if shards is None else shards.own
    optimizer = build_optimizer(settings.optimizer, own, settings.seed)
    lr_schedule = build_lr_schedule(settings.lr_schedule, optimizer, settings.seed)
    # The schedule also counts a step whose update is skipped; torch warns when that is the very first.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    return Updater(assembly.pipeline, optimizer, lr_schedule, average, settings.trainer.gradient_clip, shards)


def make_saver(
    context: Context,
    config: Mapping[str, Any],
    assembly: Assembly,
    updater: Updater,
    journal: Notices,
    resumed: CheckpointInfo | None,
) -> Saver:
    """Makes what saves checkpoints; replica 0 writes, the others hold the same weights."""
    world, keep = assembly.world, assembly.settings.checkpoint.keep
    layers, run_dir, device = assembly.layout.layers, context.run_dir, world.device.type
    writer = CheckpointWriter(run_dir, world.worker, layers, keep, device) if world.replica == 0 else None
    state = RunState(
        configuration=config["settings"],
        data_fingerprint=fingerprint(assembly.source),
        vocabularies=vocabularies(assembly.source) if world.rank == 0 else {},
    )
    saved_step = resumed.step if resumed is not None and resumed.run_dir.samefile(run_dir) else -1
    return Saver(run_dir, world, writer, updater, state, saved_step)


def warn_of_single_examples(assembly: Assembly, journal: Notices) -> None:
    """Warns where BatchNorm sees one example at a time; every worker calls it at the same time."""
    config, world = assembly.settings.pipeline, assembly.world
    alone = assembly.first.smallest == 1 and not (config.sync_batchnorm and world.replicas > 1)
    if alone and any(world.all_gather(any(cell.batchnorms for cell in assembly.cells))):
        journal.warn(
            "a micro-batch has a single example, so in training BatchNorm normalises over the places of one example "
            f"only, and evaluation will look different: lower pipeline.M={config.M} or raise data.batch_size"
        )
