"""One worker process: set itself up, run the entry point, hand over the result or the error."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpipe_cli.launch import report
from gpipe_cli.launch.channel import WorkerChannel
from gpipe_cli.launch.context import Context, call_entry
from gpipe_cli.launch.process import die_with_parent, keep_worker_signals, redirect_output

if TYPE_CHECKING:
    from torch.distributed import Store

HEARTBEAT_SECONDS = 1.0
LOOKS, BETWEEN_LOOKS_SECONDS = 5, 0.02


def main(job: dict[str, Any], rank: int, parent: int) -> NoReturn:
    """Be worker `rank` of the job that the supervisor wrote down (see supervisor.py, `_job_file`); never returns.

    The process ends by `os._exit` in every case: a normal interpreter exit runs destructors that may wait for peers.
    """
    die_with_parent(parent)
    try:
        _run(job, rank)
        atexit._run_exitfuncs()
        leave(0)
    except BaseException:  # also when the set-up fails, or the disk is too full for a report
        traceback.print_exc()
    finally:
        leave(1)


def _run(job: dict[str, Any], rank: int) -> None:
    keep_worker_signals()
    directory = Path(job["directory"])
    redirect_output(report.log_path(directory, rank))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    for other in set(job["sockets"]) - {job["sockets"][rank]}:
        os.close(other)
    channel = WorkerChannel(job["sockets"][rank])
    context = Context(
        rank=rank,
        world_size=job["workers"],
        local_rank=rank,
        run_dir=directory.parent,
        open_store=_store_opener(job, rank),
        emit=lambda event: channel.send({"event": event}),
        stop_requested=channel.stop_requested,
    )
    _start_heartbeat(context.where, channel.send, min(HEARTBEAT_SECONDS, (job["stall_seconds"] or math.inf) / 4))
    try:
        channel.finish(call_entry(job["entry"], context, job["config"], job["threads"]))
    except BaseException as error:
        report.write_error(directory, rank, error, context.where)
        raise


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _store_opener(job: dict[str, Any], rank: int) -> Callable[[], Store]:
    """Rank 0 serves the store on the socket that the command already listens on: no port can be taken meanwhile."""
    listener: int = job["listener"]
    os.set_inheritable(listener, False)
    if rank != 0:
        os.close(listener)

    def open_store() -> Store:
        from torch.distributed import TCPStore

        return TCPStore(
            "127.0.0.1",
            job["port"],
            job["workers"],
            is_master=rank == 0,
            timeout=timedelta(seconds=300),
            wait_for_workers=False,
            master_listen_fd=listener if rank == 0 else None,
        )

    return open_store


def _start_heartbeat(where: dict[str, Any], send: Callable[[dict[str, Any]], None], interval: float) -> None:
    """Tell the command where this worker is, whenever that has changed: it cannot say so itself once it is killed.

    A thread, since the worker may be blocked.
    """

    def beat() -> None:
        told: dict[str, Any] = {}
        while True:
            time.sleep(interval)
            if (now := place_soon(where)) != told:
                told = now
                send({"where": now})

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def place_soon(where: dict[str, Any]) -> dict[str, Any]:
    """What a worker is doing; one between two instructions, and so in no cell, is looked at a few times more."""
    for _ in range(LOOKS):
        if "cell" not in where or where["cell"] is not None:
            break
        time.sleep(BETWEEN_LOOKS_SECONDS)
    return where.copy()
