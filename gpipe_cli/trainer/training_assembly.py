"""Assembles the trainer on top of the pipeline: optimizer, learning rate schedule, checkpoints, reports, loop."""

import warnings
from collections.abc import Mapping
from dataclasses import fields as fields_of
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from ..checkpoint.compatibility import require_compatible, vocabularies
from ..checkpoint.files import CheckpointInfo, RunState, shorten
from ..checkpoint.writer import CheckpointWriter, prepare_directory
from ..distributed.optimizer_shards import OptimizerShards
from ..distributed.pipeline import WorkerPipeline
from ..errors import ConfigurationError
from ..factory.build import build_lr_schedule, build_optimizer
from ..factory.groups import GroupKey, Groups
from ..launch.context import Context
from ..metrics.journal import Notices
from ..metrics.records import Progress
from ..optim.average import WeightAverage
from .assembly import Assembly, assemble_evaluator
from .batches import TrainingBatches
from .initial_weights import begin_with_weights
from .loop import Trainer
from .nonfinite import begin_scale
from .saving import Saver
from .update import Updater


def assemble_training(
    context: Context, config: Mapping[str, Any], assembly: Assembly, journal: Notices, resumed: CheckpointInfo | None
) -> Trainer:
    """Makes the trainer, at its beginning or where ``resumed`` left off; every worker calls it at the same time.

    Args:
        config: with the resolved configuration under "settings", for the checkpoints.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
    """
    settings = assembly.settings
    _check_steps(config, assembly, resumed)
    if resumed is None and settings.checkpoint.init_from is not None:
        begin_with_weights(assembly, journal)
    updater = make_updater(assembly)
    if resumed is not None:
        with context.where.doing("reading the checkpoint"):
            restore(config, updater, journal, resumed)
    saver = make_saver(context, config, assembly, updater, resumed)
    if assembly.world.rank == 0:
        prepare_directory(context.run_dir, resumed)
    progress, position = Progress(), None
    if resumed is not None:
        saved, known = resumed.state.scalars, (each.name for each in fields_of(Progress))
        scalars: dict[str, Any] = {key: saved[key] for key in known if saved.get(key) is not None}
        progress, position = Progress(**{**scalars, "step": resumed.step}), resumed.state.data_position
        journal.message(f"continuing from {resumed.path}, step {resumed.step}")
    for cell in assembly.pipeline.cells:
        cell.guard_buffers()
    assembly.pipeline.ties.spread()
    begin_scale(progress, settings.precision.loss_scale)
    batches = TrainingBatches(settings.trainer, assembly.pipeline, assembly.source, position, context.stop_requested)
    evaluator = assemble_evaluator(assembly, context.stop_requested)
    return Trainer(assembly, batches, updater, evaluator, saver, journal, progress)


def _check_steps(config: Mapping[str, Any], assembly: Assembly, resumed: CheckpointInfo | None) -> None:
    """Refuses an unknown or, in a resumed run, another number of steps where layers depend on it."""
    settings, names = assembly.settings, layers_that_depend_on_steps(assembly.pipeline)
    if names and settings.trainer.steps is None:
        raise ConfigurationError(
            f"trainer.steps=null, but their number decides what these layers do (begin_step): {shorten(names)}: set "
            "trainer.steps; trainer.epochs and trainer.seconds may end the run before"
        )
    if names and resumed is not None:
        require_compatible(resumed, config["settings"], settings.checkpoint.allow_changes, names)


def restore(config: Mapping[str, Any], updater: Updater, journal: Notices, resumed: CheckpointInfo) -> None:
    """Restores weights, optimizer and learning rate; every worker calls it at the same time.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, or something in it does not fit this run.
    """
    saved: Mapping[str, Any] = resumed.state.configuration
    before, now = (tree["optimizer"]["_target_"] for tree in (saved, config["settings"]))
    updater.restore_layers(resumed, keep_memory=before == now)
    if before != now:
        journal.warn(f"optimizer._target_ was {before} in the checkpoint: {now} begins without memory")
    updater.restore_lr(resumed, config["settings"])


def layers_that_depend_on_steps(pipeline: WorkerPipeline) -> list[str]:
    """Returns the names of the model's layers with a `begin_step`, except those whose `depends_on_steps` is False."""
    parts = [(layer.name, part) for layer in pipeline.layers for part in layer.module.modules()]
    depend = (name for name, part in parts if hasattr(part, "begin_step") and getattr(part, "depends_on_steps", True))
    return list(dict.fromkeys(pipeline.world.gather_from_workers(depend)))


def make_updater(assembly: Assembly) -> Updater:
    """Makes optimizer, learning rate schedule and weight average of this worker's cells."""
    settings, pipeline, world = assembly.settings, assembly.pipeline, assembly.world
    group, parameters, decay = world.replica_group, pipeline.parameters(), settings.trainer.average
    average = None if decay is None else WeightAverage(pipeline.cells, decay)
    shards = None
    if settings.pipeline.shard_optimizer and group is not None:
        replicas = slice(world.worker, None, world.workers)  # of all ranks, those with these layers
        shards = OptimizerShards(parameters, group, lambda value: world.all_gather(value)[replicas])
    groups, own = Groups(settings.optimizer), set(parameters if shards is None else shards.own)
    named = [*pipeline.named_parameters()]
    keys = world.gather_from_workers(groups.divided(named))
    members: dict[GroupKey, list[nn.Parameter]] = {tuple(key): [] for key in keys}
    members |= groups.divided(pair for pair in named if pair[1] in own)
    optimizer = build_optimizer(settings.optimizer, members, settings.seed)
    lr_schedule = build_lr_schedule(settings.lr_schedule, optimizer, settings.seed)
    # The schedule also counts a step whose update is skipped; torch warns when that is the very first.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    return Updater(pipeline, optimizer, lr_schedule, average, settings.trainer.gradient_clip, shards)


def make_saver(
    context: Context, config: Mapping[str, Any], assembly: Assembly, updater: Updater, resumed: CheckpointInfo | None
) -> Saver:
    """Makes the saver of checkpoints; replica 0 writes, the others hold the same weights."""
    world, keep = assembly.world, assembly.settings.checkpoint.keep
    layers, run_dir, device = [builder.name for builder in assembly.builders], context.run_dir, world.device.type
    writer = CheckpointWriter(run_dir, world.worker, layers, keep, device) if world.replica == 0 else None
    state = RunState(
        configuration=config["settings"],
        data_fingerprint=None if assembly.source is None else assembly.source.fingerprint(),
        vocabularies=vocabularies(assembly.source) if world.rank == 0 else {},
    )
    saved_step = resumed.step if resumed is not None and resumed.run_dir.samefile(run_dir) else -1
    return Saver(run_dir, assembly.pipeline.message, writer, updater, state, saved_step)


def require_equal_replicas(pipeline: WorkerPipeline) -> None:
    """Refuses a run whose replicas hold different weights or buffers; every worker calls it at the same time.

    Raises:
        ConfigurationError: it names the first layer that differs.
    """
    world = pipeline.world
    if world.replicas == 1:
        return
    everyone = world.all_gather([(layer.name, fingerprint(layer.module)) for layer in pipeline.layers])
    for rank, layers in enumerate(everyone):
        for (name, mark), (_, first) in zip(layers, everyone[rank % world.workers], strict=True):
            if mark != first:
                raise ConfigurationError(
                    f"layer {name!r} has other weights on replica {rank // world.workers} than on replica 0: something "
                    "that makes the model is not the same in every process. Draw weights from the default generators "
                    "of torch, numpy or Python, which gpipe-train seeds, and read the same files on every machine"
                )


def fingerprint(module: nn.Module) -> str:
    """Returns a checksum of the names, types and values of all parameters and buffers."""
    checksum = blake2b(digest_size=16)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        checksum.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()
