"""Defines the entry point of `gpipe-train`'s workers: assembles, trains, and leaves a summary."""

import json
import os
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # every optimizer imports it when it is made; imported here once, before workers are forked
from torch import nn

from ..checkpoint.compatibility import require_compatible, require_same_data, vocabularies
from ..checkpoint.files import CheckpointInfo, RunState, open_checkpoint, read_manifest, shorten, vocabulary_folder
from ..checkpoint.writer import CheckpointWriter, prepare_directory
from ..comparison.at_start import compare_at_start, given_by, is_traced, refuse_fewer
from ..comparison.module_itself import maker_of
from ..config import BEFORE_CHOICE, PipelineConfig, Settings
from ..data.source import Source
from ..disk import writing
from ..distributed.device import machine_id
from ..distributed.optimizer_shards import OptimizerShards
from ..distributed.pipeline import WorkerPipeline
from ..errors import ConfigurationError
from ..factory.build import build_lr_schedule, build_optimizer, build_task, build_trackers, try_lr_schedule
from ..factory.groups import GroupKey, Groups
from ..gpus import GPU
from ..launch.context import Context
from ..metrics.journal import Journal, Notices
from ..metrics.records import Progress
from ..optim.average import WeightAverage
from ..planner.measure.this_device import free_memory_of_gpu, present_device, room_for_tensors, workers_on_a_gpu
from ..planner.options import peak_flops
from ..version import __version__
from .assembly import Assembly, assemble_evaluator, assemble_model, start_worker
from .batches import TrainingBatches, first_batch
from .hang import hangs_told
from .initial_weights import begin_with_weights
from .loop import Trainer
from .nonfinite import begin_scale
from .saving import Saver
from .update import Updater

CHOICE_SECONDS = 3600.0  # timing the layers of a large model takes its time


def main(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Trains; the entry point of a worker.

    Args:
        context: this worker's place in the job.
        config: "settings", the resolved configuration as plain values; optionally "started_at", by `time.monotonic`,
            and "restarts" of the run so far.

    Returns:
        The summary, as in summary.json.

    Raises:
        ConfigurationError: something in the configuration, or in how a layer behaves, that shows only now.
        LayerFailed: an exception in a layer.
        NonFinite: too many updates in a row were not finite.
    """
    config = {**config, "settings": with_placement(context, with_choice(context, config["settings"]))}
    settings = Settings.from_config(config["settings"])
    world = start_worker(context, settings)
    resumed = None
    if settings.checkpoint.resume is not None:  # one look at all files is enough; each worker checks those it loads
        resumed = (open_checkpoint if world.rank == 0 else read_manifest)(Path(settings.checkpoint.resume))
    task = build_task(settings.task, settings.seed, Notices(context.emit, world.replica == 0).warn)
    try_lr_schedule(settings)  # refused before data is prepared
    emit, writes = context.emit, world.rank == 0
    trackers = build_trackers(settings.logging.trackers)
    journal = Journal(context.run_dir, emit, settings, task, trackers) if writes else Notices(emit, False)
    assembly = assemble_model(context, settings, world, task, journal)
    if is_traced(assembly.builders):
        if was := getattr(maker_of(assembly.builders[0]).traced_from.constructor, "was", ""):
            journal.message(f"the weights were {was} and learn in float32: model.module.dtype={was} keeps their type")
        with context.where.doing("comparing the layers with the module itself"):
            compare_module(assembly, journal)
    if resumed is not None and world.rank == 0:
        require_same_data(resumed, assembly.source, settings.checkpoint.allow_changes)
    if assembly.source is not None and world.rank == 0:
        with writing(folder := vocabulary_folder(context.run_dir)):
            assembly.source.keep_vocabularies(folder)  # so that the run translates without its data
    trainer = assemble_training(context, config, assembly, journal, resumed)
    if world.device.type == GPU and not (settings.precision.tf32 or settings.precision.autocast):
        journal.message("float32 runs without TF32; precision.tf32=true is faster and rounds factors to 10 bits")
    cut = assembly.pipeline.cut
    journal.open(trainer.progress, assembly.pipeline.schedule, cut.table, cut.flops, peak_of_devices(assembly))
    if trainer.progress.step == 0:
        journal.augmented(assembly.source)
    with hangs_told(context, settings.launch.hang_minutes):
        trainer.run()
    summary = summarize(trainer, assembly, config)
    trainer.draw()
    journal.summary(summary)
    return summary


# -- the trainer on top of the pipeline ------------------------------------------------------------------------------


def assemble_training(
    context: Context, config: Mapping[str, Any], assembly: Assembly, journal: Notices, resumed: CheckpointInfo | None
) -> Trainer:
    """Makes the trainer, at its beginning or where ``resumed`` left off; every worker calls it at the same time.

    Args:
        config: has the resolved configuration under "settings", for the checkpoints.
        resumed: the checkpoint from which the run continues; None: it begins.

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
    """Refuses an unknown number of steps or, in a resumed run, another one, if layers depend on it."""
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
    updater.restore_lr(resumed.step)


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


# -- before and behind it ----------------------------------------------------------------------------------------------


def compare_module(assembly: Assembly, journal: Notices) -> None:
    """Compares a traced module with itself on rank 0, while the other ranks wait for the result.

    Raises:
        ConfigurationError: they differ, or cannot be compared.
    """
    settings, world, builders = assembly.settings, assembly.world, assembly.builders

    def compared() -> list[int]:
        batch = first_batch(cast(Source, assembly.source), settings.pipeline.M, world.replicas)
        given = given_by(settings, assembly.pipeline.task, batch.micro_batches)
        return compare_at_start(builders, given, journal.message)

    refuse_fewer(assembly.pipeline.layers, *world.broadcast(compared))


def summarize(trainer: Trainer, assembly: Assembly, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of summary.json; every worker calls it at the same time."""
    progress, totals, pipeline = trainer.progress, trainer.totals, assembly.settings.pipeline
    world, cut = assembly.world, assembly.pipeline.cut
    now = time.monotonic()
    started = float(config.get("started_at", now))
    return {
        "steps": progress.step,
        "loss": progress.loss,
        "stopped_by": progress.stopped_by,
        "skipped_updates": progress.skipped,
        "restarts": config.get("restarts", []),
        "evaluation": trainer.last_evaluation,
        "wall_seconds": now - started,
        "first_step_seconds": totals.first_step_at - started if totals.first_step_at else None,
        **totals.figures(assembly.pipeline.schedule, cut.table),
        "K": pipeline.K,
        "M": pipeline.M,
        "workers": world.workers,
        "replicas": world.replicas,
        "parameters": cut.parameters,
        "data_defects": {} if assembly.source is None else dict(assembly.source.prepared_defects),
        "device": str(world.device.type),
        "versions": {"gpipe_cli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def peak_of_devices(assembly: Assembly) -> float | None:
    """Returns the FLOP/s that the data sheets of all devices promise together; None where they are not known."""
    world, settings = assembly.world, assembly.settings
    if world.device.type != GPU or settings.precision.tf32:
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device), settings.precision.autocast is not None)
    return None if peak is None else peak * world.size / workers_on_a_gpu(settings.pipeline, world.size)


def with_choice(context: Context, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with plain values in place of `auto`; every worker calls it at the same time.

    The first worker asks the planner, with this machine's measured rates and the least free memory of all workers, for
    the fastest pipeline on as many devices as there are workers, and tells the others. `chosen` is emitted with what a
    person could have typed.

    Raises:
        ConfigurationError: nothing fits, on the first worker.
    """
    settings = Settings.from_config(config)
    if not settings.pipeline.auto:
        return dict(config)

    def choose(free: list[str]) -> str:
        with context.where.doing("choosing the pipeline"):
            chosen = _choose(settings, min(map(float, free)), context.world_size)
        context.emit({"kind": "chosen", "keys": {f"pipeline.{name}": value for name, value in chosen.items()}})
        return json.dumps(chosen)

    own = str(_free_memory(settings.pipeline, context))
    chosen = json.loads(context.decide("chosen pipeline", own, choose, CHOICE_SECONDS))
    starts = {name: BEFORE_CHOICE[name] for name in settings.pipeline.auto}  # `keep` may have been chosen for `remat`
    return {**config, "pipeline": {**config["pipeline"], **starts, **chosen}}


def with_placement(context: Context, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with a plain value of `pipeline.placement`; every worker calls it at the same time.

    Only replicas of several workers, on several nodes, need a choice. The first worker then asks the planner.
    """
    if context.messenger is not None:  # the command has started all workers on its own machine
        return dict(config)
    settings = Settings.from_config(config)
    pipeline = settings.pipeline
    if pipeline.replicas in (1, context.world_size):
        return dict(config)

    def choose(nodes: list[str]) -> str:
        from ..planner.options import Options
        from ..planner.planner import Planner

        placement, said = str(pipeline.placement), f"placement {pipeline.placement}: as typed"
        if placement == "auto":
            if (node := len(nodes) // len({*nodes})) == len(nodes):
                return "pipeline_inside"
            with context.where.doing("choosing the placement on nodes"):
                plan = Planner(settings, Options(node=node)).plan()
            placement, said = plan.placement, plan.notes[-1]
        context.emit({"kind": "message", "text": said})
        return placement

    placement = context.decide("placement", os.environ.get("GROUP_RANK", machine_id()), choose, CHOICE_SECONDS)
    return {**config, "pipeline": {**config["pipeline"], "placement": placement}}


def _free_memory(pipeline: PipelineConfig, context: Context) -> float:
    """Returns the bytes that this worker has for tensors on its GPU; infinity on a CPU."""
    if present_device(pipeline).type != GPU:
        return inf
    free = free_memory_of_gpu(torch.device(GPU, context.local_rank % torch.cuda.device_count()))
    return room_for_tensors(free, workers_on_a_gpu(pipeline, context.world_size))


def _choose(settings: Settings, memory: float, devices: int) -> dict[str, Any]:
    """Returns the values of the keys of `pipeline` that are `auto`, of the fastest plan on so many devices.

    Args:
        memory: bytes for tensors on each device.
    """
    from ..planner.options import Options  # a run without `auto` needs no planner
    from ..planner.planner import Planner
    from ..planner.search import Search

    pipeline = settings.pipeline
    free = {*pipeline.auto} | ({"workers"} if {"K", "replicas"} & {*pipeline.auto} else set())
    if "K" not in free and "replicas" not in free and pipeline.worker_count * pipeline.replicas != devices:
        raise ConfigurationError(f"{devices} workers do not fit the pipeline: use pipeline.workers=auto")
    planner = Planner(settings, Options(best=True, most_workers=devices))
    planner.device = replace(planner.device, memory=min(memory, planner.device.memory))
    found = Search(planner, free).fastest(devices).found
    return {key.removeprefix("pipeline."): value for key, value in found.items()}
