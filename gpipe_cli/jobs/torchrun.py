"""Runs the command as one rank of a torchrun job: rank 0 decides and writes, the others follow."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gpipe_cli.disk import LogFile
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.join import joined, lasting_store, restart_count
from gpipe_cli.launch.report import LOG_LINE, log_path
from gpipe_cli.typed_section import typed

if TYPE_CHECKING:
    from gpipe_cli.launch.context import Context

ENTRY = "gpipe_cli.jobs.torchrun:enter"
KEY, DIRECTORY = "rank_0_decides", "directory"  # in the store
PAUSE = 0.2  # seconds between two looks for what rank 0 has decided
SHARED_SECONDS = 10.0  # until rank 0's run directory must be seen on the other machines
HEAD_START = 2.0  # seconds; torchrun ends all ranks when one has failed, and rank 0 must print the reason first


def is_first() -> bool:
    """Returns True if this process writes and prints: it is alone, or rank 0 of its job."""
    return not joined() or os.environ["RANK"] == "0"


def world_size() -> int | None:
    """Returns the number of processes of the torchrun job; None if the command starts its own workers."""
    return int(os.environ["WORLD_SIZE"]) if joined() else None


@contextmanager
def own_places() -> Iterator[list[str]]:
    """Yields the overrides of Hydra's directories.

    Rank 0 of a job that torchrun has started again keeps its directory; ranks above 0 write to an empty one of theirs.
    """
    if not is_first():
        with tempfile.TemporaryDirectory(prefix="gpipe-") as folder:
            places = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
            yield [*places, "hydra/job_logging=disabled"]
        return
    store = lasting_store() if restart_count() else None
    yield [] if store is None or not store.check([DIRECTORY]) else [store.get(DIRECTORY).decode()]


def refuse_separate_directories(context: Context) -> None:
    """Refuses a run directory that not all ranks see, on every rank, before the run begins.

    Each rank writes its layers of a checkpoint into it.

    Raises:
        ConfigurationError: a rank does not find it; the message names such ranks and their machines.
    """
    end = time.monotonic() + SHARED_SECONDS
    while not context.run_dir.is_dir() and time.monotonic() < end:  # network file systems may show it late
        time.sleep(PAUSE)
    if blind := context.decide(
        "shared_directory",
        "" if context.run_dir.is_dir() else f"{context.rank} on {socket.gethostname()}",
        lambda ranks: ", ".join(filter(None, ranks)),
    ):
        raise ConfigurationError(
            f"the run directory {context.run_dir} of rank 0 is not there for rank {blind}: each rank saves its layers "
            "there, so type a hydra.run.dir on a file system that all machines share"
        )


def log_of_rank(context: Context) -> None:
    """Logs what this rank has to say to workers/rank_N.log of the run, too, as workers of the command's own do."""
    path = log_path(context.run_dir / "workers", context.rank)
    path.parent.mkdir(exist_ok=True)
    file = LogFile(path)
    file.setFormatter(logging.Formatter(LOG_LINE))
    root = logging.getLogger()
    root.addHandler(file)
    root.setLevel(logging.INFO)


def own_place() -> tuple[str, str]:
    """Returns the key and the path of this command's directory: of a sweep the one of all its jobs."""
    place = HydraConfig.get()
    if place.mode == RunMode.MULTIRUN:
        return "hydra.sweep.dir", place.sweep.dir
    return "hydra.run.dir", place.runtime.output_dir


def wrap(entry: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which `enter` calls the real entry point.

    They have the override that leads to this command's directory of runs again.
    """
    key, path = own_place()
    return {"entry": entry, "config": config, "directory": f"{key}={typed(str(Path(path).absolute()))}"}


def enter(context: Context, wrapped: dict[str, Any]) -> Any:
    """Calls the real entry point, on every rank, with the run directory and configuration of rank 0.

    Each rank has composed its own, with another `${now:}`, another environment or other checkpoints in sight.
    """
    if context.rank == 0:
        context.store.set(KEY, json.dumps([str(context.run_dir), wrapped["config"]]))
        if (lasting := lasting_store()) is not None:
            lasting.set(DIRECTORY, wrapped["directory"])
    while not context.store.check([KEY]):  # as long as rank 0 takes
        time.sleep(PAUSE)
    run_dir, config = json.loads(context.store.get(KEY))
    context.run_dir = Path(run_dir)
    refuse_separate_directories(context)
    log_of_rank(context)
    return resolve_name(wrapped["entry"])(context, config)
