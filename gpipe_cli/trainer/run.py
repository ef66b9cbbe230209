"""Defines what every worker of `gpipe-train` runs: assembles, trains, and leaves a summary."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # every optimizer imports it when it is made; imported here once, before workers are forked

from .. import __version__
from ..checkpoint.choose import open_checkpoint
from ..checkpoint.compatibility import require_same_data
from ..checkpoint.files import read_manifest, vocabulary_folder
from ..config import Settings
from ..data.source import Source
from ..disk import writing
from ..factory.build import build_lr_schedule, build_optimizer, build_task, build_trackers
from ..factory.module_itself import is_traced, look_at_first_start
from ..launch.context import Context
from ..metrics.journal import Journal, Notices
from ..micro_batch import MicroBatch
from .assembly import Assembly, assemble_model, start_worker
from .batches import first_batch
from .choice import with_choice
from .data_source import count_defects
from .equal_replicas import require_equal_replicas
from .loop import Trainer
from .training_assembly import assemble_training


def main(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Trains; the entry point of a worker.

    Args:
        context: this worker's place in the job.
        config: "settings", the resolved configuration as plain values; optionally "started_at", `time.time()`,
            "restarts" of the run so far, and "may_take_older": whether an older checkpoint may replace a damaged one.

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
    task = build_task(settings.task, settings.seed)
    build_lr_schedule(settings.lr_schedule, build_optimizer(settings.optimizer, []))  # refused before data is prepared
    emit, writes = context.emit, world.rank == 0
    trackers = build_trackers(settings.logging.trackers)
    journal = Journal(context.run_dir, emit, settings, task, trackers) if writes else Notices(emit, False)
    assembly = assemble_model(context, settings, world, task, journal)
    if world.rank == 0 and is_traced(assembly.builders):
        with context.where.doing("comparing the layers with the module itself"):
            source, M = cast(Source, assembly.source), settings.pipeline.M
            example = partial(_first_micro_batch, source, M, world.replicas)
            look_at_first_start(assembly.builders, assembly.settings.model, task, example, journal.message)
    if resumed is not None and world.rank == 0:
        require_same_data(resumed, assembly.source, settings.checkpoint.allow_changes)
    if assembly.source is not None and world.rank == 0:
        with writing(folder := vocabulary_folder(context.run_dir)):
            assembly.source.keep_vocabularies(folder)  # so that the run translates without its data
    trainer = assemble_training(context, config, assembly, journal, resumed)
    require_equal_replicas(world, assembly.cells)
    journal.open(trainer.progress.step, assembly.pipeline)
    trainer.run()
    summary = summarize(trainer, assembly, config)
    trainer.draw()
    journal.summary(summary)
    return summary


def _first_micro_batch(source: Source, M: int, replicas: int) -> MicroBatch:
    return first_batch(source, M, replicas).micro_batches[0]


def summarize(trainer: Trainer, assembly: Assembly, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of summary.json; every worker calls it at the same time."""
    progress, totals, pipeline = trainer.progress, trainer.totals, assembly.settings.pipeline
    world, cut = assembly.world, assembly.pipeline.cut
    now = time.time()
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
        **totals.figures(assembly.pipeline),
        "K": pipeline.K,
        "M": pipeline.M,
        "workers": world.workers,
        "replicas": world.replicas,
        "parameters": cut.parameters,
        "data_defects": count_defects(world, assembly.source),
        "device": str(world.device.type),
        "versions": {"gpipe_cli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
