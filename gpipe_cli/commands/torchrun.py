"""Being one rank of a job that torchrun has started: only rank 0 writes, and the others learn its run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.errors import ConfigurationError

if TYPE_CHECKING:
    from gpipe_cli.launch.context import Context

ENTRY = "gpipe_cli.commands.torchrun:enter"
KEY = "run_directory"


def overrides_of_rank(rank: int, folder: str) -> list[str]:
    """What keeps Hydra from writing into the run directory on the ranks above 0.

    Args:
        folder: an empty directory that they may write to instead.
    """
    if rank == 0:
        return []
    return [
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
    ]


def refuse_sweep_over_workers(words: Sequence[str]) -> None:
    """The number of processes is fixed for the whole torchrun job.

    Raises:
        ConfigurationError: the command line sweeps over a key that changes it.
    """
    if not {"-m", "--multirun"} & set(words):
        return
    for word in words:
        match = re.match(r"\+{0,2}(pipeline\.(?:K|workers|replicas))=", word)
        if match and re.search(r"[^\[]*,|range\(|choice\(|glob\(", word.partition("=")[2]):
            raise ConfigurationError(
                f"{word}: torchrun has started {os.environ['WORLD_SIZE']} processes for all jobs of the sweep, so "
                f"{match[1]} cannot be swept; drop torchrun, and gpipe-train starts the workers of each job itself"
            )


def wrap(entry: str, config: dict[str, Any]) -> dict[str, Any]:
    """What `enter` needs to go on to the real entry point."""
    return {"entry": entry, "config": config}


def enter(context: Context, wrapped: dict[str, Any]) -> Any:
    """Agree on rank 0's run directory, then call the real entry point (runs in every rank)."""
    if context.rank == 0:
        context.store.set(KEY, str(context.run_dir))
    else:
        context.run_dir = Path(context.store.get(KEY).decode())
    module, _, function = wrapped["entry"].partition(":")
    return getattr(import_module(module), function)(context, wrapped["config"])
