"""Refuses what this machine cannot run, and data that are not there, before workers start.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpipe_cli.config import Checks, Settings
from gpipe_cli.cpu import usable_memory
from gpipe_cli.jobs import torchrun

THREADS_OF_A_CORE = 8  # at most: a run may go on, with the same number of threads, on a smaller machine
WORKER_BYTES = 32 << 20  # that a worker needs at least, without its part of the model


def _machine(settings: Settings) -> Iterator[str]:
    pipeline, cores, memory = settings.pipeline, os.cpu_count() or 1, usable_memory()
    most = max(16, THREADS_OF_A_CORE * cores)
    if pipeline.threads > most:
        yield f"pipeline.threads={pipeline.threads}: this machine has {cores} cores, use at most {most}"
    if pipeline.backend == "nccl" and pipeline.device == "cpu":
        yield "pipeline.backend=nccl is for GPUs, but pipeline.device=cpu: use pipeline.backend=auto"
    workers = 1 if pipeline.workers == "auto" else pipeline.workers
    number = workers * pipeline.replicas
    if torchrun.world_size() is None and memory is not None and number * WORKER_BYTES > memory:
        key = f"replicas={pipeline.replicas}" if pipeline.replicas > workers else f"workers={workers}"
        yield (
            f"pipeline.{key}: {number:,} processes need at least {number * WORKER_BYTES / 1e9:,.0f} GB of memory, "
            f"this machine has {memory / 1e9:,.0f} GB: use fewer"
        )


def _files(settings: Settings) -> Iterator[str]:
    data, kinds = settings.data, ("gpipe_cli.data.parallel.", "gpipe_cli.data.images.source.", "gpipe_cli.data.text.")
    if not data["_target_"].startswith(kinds) or data.get("download") is True:
        return
    if data.get("root") is None and not data.get("train"):
        yield "data.root is not set: type data.root=FOLDER, the folder that holds the data (docs/data.md)"
        return
    places = [(key, Path(str(data[key]))) for key in ("root", "evaluation_root", "tokenizer") if data.get(key)]
    for key, place in places:
        if not place.expanduser().exists():
            yield f"data.{key}={data[key]}: there is no {place}"


MACHINE: Checks = (_machine,)
TRAINING: Checks = (_machine, _files)
