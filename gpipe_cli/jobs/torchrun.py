"""Runs the command as one rank of a torchrun job: rank 0 decides and writes, the others follow."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from gpipe_cli.disk import LogFile
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.join import joined
from gpipe_cli.launch.report import LOG_LINE, log_path

if TYPE_CHECKING:
    from gpipe_cli.launch.context import Context

PAUSE = 0.2  # seconds between two looks for a directory
SHARED_SECONDS = 10.0  # until rank 0's run directory must be seen on the other machines
HEAD_START = 2.0  # seconds; torchrun ends all ranks when one has failed, and rank 0 must print the reason first


def is_first() -> bool:
    """Returns True if this process writes and prints: it is alone, or rank 0 of its job."""
    return not joined() or os.environ["RANK"] == "0"


def world_size() -> int | None:
    """Returns the number of processes of the torchrun job; None if the command starts its own workers."""
    return int(os.environ["WORLD_SIZE"]) if joined() else None


@contextmanager
def own_places(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields further overrides, which give ranks above 0 an empty directory of their own.

    Raises:
        ConfigurationError: torchrun may start the job again, which would not find its directory.
    """
    typed_place = any(word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for word in words)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not typed_place:
        raise ConfigurationError("with torchrun --max-restarts type hydra.run.dir=FOLDER: a restart goes on there")
    if is_first():
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="gpipe-") as folder:
        places = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
        yield [*places, "hydra/job_logging=disabled"]


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
    """Sends this rank's log to workers/rank_N.log of the run, too, as the command's own workers do."""
    path = log_path(context.run_dir / "workers", context.rank)
    path.parent.mkdir(exist_ok=True)
    file = LogFile(path)
    file.setFormatter(logging.Formatter(LOG_LINE))
    root = logging.getLogger()
    root.addHandler(file)
    root.setLevel(logging.INFO)


def enter(entry: str, context: Context, config: dict[str, Any]) -> Any:
    """Calls an entry point, "package.module:function", on every rank with rank 0's run directory and configuration.

    Each rank has composed its own, which may differ by time (`${now:}`), environment or checkpoints in sight.
    """
    own = json.dumps([str(context.run_dir), config])
    run_dir, config = json.loads(context.decide("rank_0_decides", own, lambda everyone: everyone[0]))
    context.run_dir = Path(run_dir)
    refuse_separate_directories(context)
    log_of_rank(context)
    return resolve_name(entry)(context, config)
