"""Runs the command as one rank of a torchrun job: rank 0 decides and writes, the others follow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.join import joined, lasting_store, restart_count

if TYPE_CHECKING:
    from gpipe_cli.launch.context import Context

ENTRY = "gpipe_cli.jobs.torchrun:enter"
FIXED = ("pipeline.K", "pipeline.workers", "pipeline.replicas")  # keys that change the number of processes
KEY, DIRECTORY = "rank_0_decides", "directory"  # in the store
PAUSE = 0.2  # seconds between two looks for what rank 0 has decided
HEAD_START = 2.0  # seconds; torchrun ends all ranks when one has failed, and rank 0 must print the reason first


def is_first() -> bool:
    """Returns whether this process writes and prints: it is alone, or rank 0 of its job."""
    return not joined() or os.environ["RANK"] == "0"


def world_size() -> int | None:
    """Returns the number of processes of the torchrun job; None if the command starts its own workers."""
    return int(os.environ["WORLD_SIZE"]) if joined() else None


def overrides_elsewhere(folder: str) -> list[str]:
    """Returns the overrides that keep Hydra on ranks above 0 from writing into the run directory.

    Args:
        folder: an empty directory to write to instead.
    """
    return [
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
    ]


def overrides_after_restart() -> list[str]:
    """Returns the override that leads rank 0 to the directory that it used before torchrun restarted the processes."""
    store = lasting_store() if restart_count() else None
    return [] if store is None or not store.check([DIRECTORY]) else [store.get(DIRECTORY).decode()]


def refuse_sweep_over_workers(words: Sequence[str]) -> None:
    """Refuses a sweep over the number of processes, which is fixed for a torchrun job.

    Raises:
        ConfigurationError: the command line sweeps over a key that changes it.
    """
    if not {"-m", "--multirun"} & set(words):
        return
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            continue  # an option, or what Hydra will refuse
        if override.is_sweep_override() and override.key_or_group in FIXED:
            raise ConfigurationError(
                f"{word}: torchrun has started {os.environ['WORLD_SIZE']} processes for all jobs of the sweep, so "
                f"{override.key_or_group} cannot be swept; drop torchrun, and gpipe-train starts the workers of each "
                "job itself"
            )


def wrap(entry: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which `enter` calls the real entry point."""
    return {"entry": entry, "config": config, "directory": _directory()}


def _directory() -> str:
    """Returns the override that leads to this command's directory of runs again."""
    place = HydraConfig.get()
    if place.mode == RunMode.MULTIRUN:
        key, path = "hydra.sweep.dir", place.sweep.dir
    else:
        key, path = "hydra.run.dir", place.runtime.output_dir
    quoted = str(Path(path).absolute()).replace("'", "\\'")
    return f"{key}='{quoted}'"


def enter(context: Context, wrapped: dict[str, Any]) -> Any:
    """Calls the real entry point, on every rank, with the run directory and configuration of rank 0.

    Each rank has composed its own, with another `${now:}`, another environment or other checkpoints in sight.
    """
    if context.rank == 0:
        context.store.set(KEY, json.dumps([str(context.run_dir), wrapped["config"]]))
        if (lasting := lasting_store()) is not None:
            lasting.set(DIRECTORY, wrapped["directory"])
    while not context.store.check([KEY]):  # as long as rank 0 takes: it may be reading a large checkpoint
        time.sleep(PAUSE)
    run_dir, config = json.loads(context.store.get(KEY))
    context.run_dir = Path(run_dir)
    module, _, function = wrapped["entry"].partition(":")
    return getattr(import_module(module), function)(context, config)
