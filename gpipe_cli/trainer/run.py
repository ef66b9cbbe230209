"""Defines the entry point of `gpipe-train`'s workers: assembles, trains, and leaves a summary."""

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # every optimizer imports it when it is made; imported here once, before workers are forked

from ..checkpoint.compatibility import require_same_data
from ..checkpoint.files import open_checkpoint, read_manifest, vocabulary_folder
from ..comparison.at_start import compare_at_start, given_by, is_traced, refuse_fewer
from ..comparison.module_itself import maker_of
from ..config import BEFORE_CHOICE, PipelineConfig, Settings
from ..data.source import Source
from ..disk import writing
from ..errors import ConfigurationError
from ..factory.build import build_task, build_trackers, try_lr_schedule
from ..gpus import GPU
from ..launch.context import Context
from ..metrics.journal import Journal, Notices
from ..version import __version__
from .assembly import Assembly, assemble_model, start_worker
from .batches import first_batch
from .loop import Trainer
from .training_assembly import assemble_training, require_equal_replicas

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
    config = {**config, "settings": with_choice(context, config["settings"])}
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
    require_equal_replicas(assembly.pipeline)
    journal.open(trainer.progress, assembly.pipeline.schedule, assembly.pipeline.cut.table)
    if trainer.progress.step == 0:
        journal.augmented(assembly.source)
    trainer.run()
    summary = summarize(trainer, assembly, config)
    trainer.draw()
    journal.summary(summary)
    return summary


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


def _free_memory(pipeline: PipelineConfig, context: Context) -> float:
    """Returns the bytes that this worker has for tensors on its GPU; on a CPU no limit."""
    from ..planner.measure.this_device import free_memory_of_gpu, present_device, room_for_tensors, workers_per_gpu

    if present_device(pipeline).type != GPU:
        return inf
    gpus = torch.cuda.device_count()
    free = free_memory_of_gpu(torch.device(GPU, context.local_rank % gpus))
    return room_for_tensors(free, workers_per_gpu(context.world_size, gpus, os.environ))


def _choose(settings: Settings, memory: float, devices: int) -> dict[str, Any]:
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
