"""Assembles the trainer on top of the pipeline: optimizer, learning rate schedule, checkpoints, reports, loop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..checkpoint.choose import advice, older, open_checkpoint
from ..checkpoint.commit import prepare_directory
from ..checkpoint.compatibility import (
    fingerprint,
    other_vocabulary,
    require_compatible,
    require_same_steps,
    vocabularies,
)
from ..checkpoint.files import CheckpointError, CheckpointInfo, DamagedFile, is_named, shorten, vocabulary_folder
from ..checkpoint.foreign import is_foreign, match_names, open_foreign
from ..checkpoint.transfer import load_matched, named_shapes, open_run, shared_names
from ..checkpoint.writer import CheckpointWriter
from ..config import Settings
from ..distributed.exchange import Exchange
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_lr_schedule, build_optimizer
from ..launch.context import Context
from ..layers import own_name
from ..metrics.journal import Journal
from ..metrics.records import Progress
from ..metrics.step_report import StepReporter
from ..optim.average import WeightAverage
from ..optim.sharding import OptimizerShards
from ..pipeline.cell import Cell
from . import loss_scale
from .assembly import Assembly, assemble_evaluator
from .batches import TrainingBatches
from .evaluator import evaluation_fields
from .loop import Trainer
from .notices import another_device_notice, batchnorm_notice
from .saving import Saver
from .update import Updater


def assemble_training(
    context: Context,
    config: Mapping[str, Any],
    assembly: Assembly,
    journal: Journal,
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
    updater = make_updater(settings, assembly)
    if resumed is not None:
        with context.where.doing("reading the checkpoint"):
            resumed = restore(config, assembly, updater, journal, resumed)
    saver = make_saver(context, config, assembly, updater, journal, resumed)
    reporter = make_reporter(assembly)
    codec = assembly.pipeline.codec
    fields = {**codec.fields(), **reporter.fields(), **saver.fields(), **evaluation_fields(world.replicas, task)}
    exchange = Exchange(fields, world.all_ranks)
    if world.rank == 0:
        prepare_directory(context.run_dir, resumed)
    progress, position = Progress(), None
    if resumed is not None:
        scalars: dict[str, Any] = {key: value for key, value in resumed.state.scalars.items() if value is not None}
        try:
            progress, position = Progress(step=resumed.step, **scalars), resumed.state.data_position
        except TypeError as error:
            raise CheckpointError(f"{resumed.path}/manifest.json is damaged: {error}") from error
        journal.message(f"continuing from {resumed.path}, step {resumed.step}")
        if text := another_device_notice(resumed.versions, world.device.type):
            journal.warn(text)
    for cell in cells:
        cell.guard_buffers()
    assembly.pipeline.ties.spread()
    loss_scale.begin(progress, settings.precision.loss_scale)
    report_batchnorm(journal, world, cells, settings, assembly.first.examples)
    stop, where = context.stop_requested, context.where
    return Trainer(
        settings=settings,
        pipeline=assembly.pipeline,
        layout=assembly.layout,
        exchange=exchange,
        batches=TrainingBatches(settings.trainer, world, assembly.source, task, codec, position, stop, where),
        updater=updater,
        evaluator=assemble_evaluator(assembly, exchange, stop),
        saver=saver,
        reporter=reporter,
        journal=journal,
        progress=progress,
        where=where,
    )


def _check_steps(config: Mapping[str, Any], assembly: Assembly, resumed: CheckpointInfo | None) -> None:
    """Refuses an unknown or, in a resumed run, another number of steps where layers depend on it."""
    settings, names = assembly.settings, layers_that_depend_on_steps(assembly.world, assembly.cells)
    if names and settings.trainer.steps is None:
        raise ConfigurationError(
            f"trainer.steps=null, but their number decides what these layers do (begin_step): {shorten(names)}: set "
            "trainer.steps; trainer.epochs and trainer.seconds may end the run before"
        )
    if resumed is not None:
        require_same_steps(resumed, config["settings"], settings.checkpoint.allow_changes, names)


def restore(
    config: Mapping[str, Any], assembly: Assembly, updater: Updater, journal: Journal, resumed: CheckpointInfo
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
        require_compatible(other, settings, assembly.settings.checkpoint.allow_changes)
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
    return [name for worker in world.all_gather(own)[: world.workers] for name in worker]


def begin_with_weights(assembly: Assembly, journal: Journal) -> None:
    """Loads the weights and buffers of `checkpoint.init_from`; every worker calls it at the same time."""
    config, world, cells = assembly.settings.checkpoint, assembly.world, assembly.cells
    path, left_out = Path(cast(str, config.init_from)), config.init_except
    if is_foreign(path):
        saved = open_foreign(path)
    else:
        info = open_checkpoint(path)
        _warn_of_other_vocabulary(info, assembly, journal)
        saved = open_run(info, config.init_average)
    parts = world.all_gather([named_shapes(cells), shared_names(cells)])[: world.workers]
    model = {name: shape for shapes, _ in parts for name, shape in shapes.items()}
    tied: dict[str, list[str]] = {}
    for layer, ties in zip(assembly.layout.layers, assembly.layout.cut.ties, strict=True):
        for name, owner in ties.items():
            tied.setdefault(own_name(*owner), [own_name(*owner)]).append(own_name(layer, name))
    aliases = [*tied.values(), *(names for _, shared in parts for names in shared)]
    match = match_names(model, saved, aliases, left_out, path)
    for pattern in left_out:
        if not any(is_named(name, [pattern]) for name in (*model, *saved)):
            journal.warn(f"checkpoint.init_except: {pattern} is no layer or parameter of this model or of {path}")
    converted = world.all_gather(load_matched(cells, saved, match, path))
    notes = [match.renamed, *dict.fromkeys(kind for kinds in converted for kind in kinds)]
    new = [name for name in model if name not in match.saved]
    journal.message(
        f"weights from {path}{''.join(f'; {note}' for note in notes if note)}; begun anew: {shorten(new) or 'nothing'}"
    )


def _warn_of_other_vocabulary(info: CheckpointInfo, assembly: Assembly, journal: Journal) -> None:
    if assembly.world.rank == 0 and (name := other_vocabulary(info, vocabularies(assembly.source))):
        journal.warn(
            f"checkpoint.init_from={info.path} was trained with another vocabulary ({name}): its ids mean other texts. "
            f"With data=text, data.tokenizer={vocabulary_folder(info.run_dir) / name} keeps them"
        )


def make_updater(settings: Settings, assembly: Assembly) -> Updater:
    """Makes optimizer, learning rate schedule and weight average of this worker's cells."""
    cells, group = assembly.cells, assembly.world.replica_group
    average = None if settings.trainer.average is None else WeightAverage(cells, settings.trainer.average)
    parameters = [parameter for cell in cells for _, parameter in cell.parameters()]
    shards = None
    if settings.pipeline.shard_optimizer and group is not None:
        world = assembly.world
        replicas = slice(world.worker, None, world.workers)  # of all ranks, those with these layers
        shards = OptimizerShards(parameters, group, lambda value: world.all_gather(value)[replicas])
    own = parameters if shards is None else shards.own
    optimizer = build_optimizer(settings.optimizer, own, settings.seed)
    lr_schedule = build_lr_schedule(settings.lr_schedule, optimizer, settings.seed)
    # The schedule also counts a step whose update is skipped; torch warns when that is the very first.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    return Updater(
        cells, optimizer, lr_schedule, average, assembly.pipeline.ties, group, settings.trainer.gradient_clip, shards
    )


def make_saver(
    context: Context,
    config: Mapping[str, Any],
    assembly: Assembly,
    updater: Updater,
    journal: Journal,
    resumed: CheckpointInfo | None,
) -> Saver:
    """Makes what saves checkpoints; replica 0 writes, the others hold the same weights."""
    world, keep = assembly.world, assembly.settings.checkpoint.keep
    layers, run_dir, data = assembly.layout.layers, context.run_dir, fingerprint(assembly.source)
    device = world.device.type
    writer = CheckpointWriter(run_dir, world.worker, layers, keep, device) if world.replica == 0 else None
    ids = vocabularies(assembly.source) if world.rank == 0 else {}
    saved_step = resumed.step if resumed is not None and resumed.run_dir.samefile(run_dir) else -1
    return Saver(run_dir, world, writer, updater, config["settings"], data, ids, saved_step)


def make_reporter(assembly: Assembly) -> StepReporter:
    """Makes what writes and reads the report that ends each step."""
    pipeline, world, layout = assembly.settings.pipeline, assembly.world, assembly.layout
    counts = (pipeline.K, pipeline.M, world.replicas, world.size, len(layout.parameter_names))
    return StepReporter(layout.losses, *counts, len(assembly.task.statistics))


def report_batchnorm(journal: Journal, world: World, cells: Sequence[Cell], settings: Settings, examples: int) -> None:
    """Reports the examples over which BatchNorm normalises; every worker calls it at the same time.

    Args:
        examples: of replica 0's first mini-batch; the size of a mini-batch where `data.batch_size` does not give it.
    """
    layers = sum(world.all_gather(sum(len(cell.batchnorms) for cell in cells))[: world.workers])
    size, by_tokens = settings.data.get("batch_size"), settings.data.get("batch_tokens") is not None
    mini_batch = size if isinstance(size, int) and not by_tokens else examples * world.replicas
    pipeline = settings.pipeline
    notice = batchnorm_notice(layers, mini_batch, pipeline.M, pipeline.replicas, pipeline.sync_batchnorm)
    if notice is not None:
        text, warning = notice
        journal.message(text)
        if warning is not None:
            journal.warn(warning)
