"""Chooses the values of keys of `pipeline` that are `auto`, once for all workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..config import BEFORE_CHOICE, Settings
from ..errors import ConfigurationError
from ..launch.context import Context

PATIENCE = timedelta(hours=1)  # of the other workers: timing the layers of a large model takes its time


def with_choice(context: Context, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with plain values in place of `auto`; every worker calls it at the same time.

    The first worker asks the planner, with this machine's measured rates and memory, for the fastest pipeline on as
    many devices as there are workers, and tells the others. `chosen` is emitted with what a person could have typed.

    Raises:
        ConfigurationError: nothing fits, on the first worker.
    """
    settings = Settings.from_config(config)
    if not settings.pipeline.auto:
        return dict(config)
    key = "chosen pipeline"
    if context.rank == 0:
        with context.where.doing("choosing the pipeline"):
            chosen = _choose(settings, context.world_size)
        context.emit({"kind": "chosen", "keys": {f"pipeline.{name}": value for name, value in chosen.items()}})
        if context.world_size > 1:
            context.store.set(key, json.dumps(chosen))
    else:
        context.store.wait([key], PATIENCE)
        chosen = json.loads(context.store.get(key))
    starts = {name: BEFORE_CHOICE[name] for name in settings.pipeline.auto}  # `keep` may have been chosen for `remat`
    return {**config, "pipeline": {**config["pipeline"], **starts, **chosen}}


def _choose(settings: Settings, devices: int) -> dict[str, Any]:
    from ..planner.options import Options  # a run without `auto` needs no planner
    from ..planner.planner import Planner
    from ..planner.search import Search

    pipeline = settings.pipeline
    free = {*pipeline.auto} | ({"workers"} if {"K", "replicas"} & {*pipeline.auto} else set())
    if "K" not in free and "replicas" not in free and pipeline.worker_count * pipeline.replicas != devices:
        raise ConfigurationError(f"{devices} workers do not fit the pipeline: use pipeline.workers=auto")
    found = Search(Planner(settings, Options(best=True, most_workers=devices)), free).fastest(devices).found
    return {key.removeprefix("pipeline."): value for key, value in found.items()}
