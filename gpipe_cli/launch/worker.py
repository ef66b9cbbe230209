"""Runs one worker process: sets it up, calls the entry point, and sends the result or the error to the command."""

from __future__ import annotations

import atexit
import faulthandler
import io
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpipe_cli.disk import open_for_writing, writing
from gpipe_cli.launch import report
from gpipe_cli.launch.channel import WorkerChannel, open_place
from gpipe_cli.launch.context import Context, call_entry
from gpipe_cli.launch.messenger import Messenger
from gpipe_cli.parent import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store


def main(job: dict[str, Any], parent: int, rank: int) -> NoReturn:
    """Runs worker `rank` of the job that the command describes (supervisor.py); never returns.

    The process always ends by `os._exit`: a normal interpreter exit runs destructors that may wait for peers.
    """
    die_with_parent(parent)
    try:
        _run(job, rank)
        atexit._run_exitfuncs()
        leave(0)
    except BaseException:  # also when the set-up fails
        traceback.print_exc()
    finally:
        leave(1)


def _run(job: dict[str, Any], rank: int) -> None:
    _keep_running_on_signals()
    channel, messenger = _take_descriptors(job, rank)
    context = Context(
        rank=rank,
        world_size=job["workers"],
        local_rank=rank,
        run_dir=Path(job["run_dir"]),
        open_store=partial(_open_store, job["store"], job["workers"]),
        emit=lambda event: channel.send({"event": event}),
        stop_requested=channel.stop_requested,
        messenger=messenger,
        where=open_place(job["places"], rank),
    )
    try:
        redirect_output(report.log_path(Path(job["directory"]), rank))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        channel.finish(call_entry(job["entry"], context, job["config"], job["threads"]))
    except BaseException as error:
        channel.fail(report.failure_of(rank, error, context.where.known()))
        raise


def leave(code: int) -> NoReturn:
    """Ends this process at once, without exit handlers."""
    with suppress(OSError, ValueError):  # a full disk, a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Log(io.FileIO):
    """Writes to a descriptor; what a full disk does not take is lost and raises nothing."""

    def write(self, content: Any, /) -> int:
        with suppress(OSError):
            super().write(content)
        return memoryview(content).nbytes


def redirect_output(log: Path) -> None:
    """Appends this process's output, C++ libraries' included, to the file `log`; its input becomes empty.

    Raises:
        DiskError: the file cannot be opened.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with writing(log):
        output = open_for_writing(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.close(output)
    os.close(nothing)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(_Log(number, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for number in (1, 2)
    )


def _keep_running_on_signals() -> None:
    """Ignores SIGINT, and on SIGTERM only writes all stacks to the log, even inside C++: the command decides to stop.

    Batch systems send SIGTERM to every process of a job at once; a worker that died of it could not save any more.
    The workers' own children keep the default rules, or `multiprocessing.Pool.terminate` would wait for ever. A signal
    sent to a child that has not restored them yet waits until it has: SIGTERM is blocked for as long as a fork takes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM)

    def restore_in_child() -> None:
        faulthandler.unregister(signal.SIGTERM)
        _mask_sigterm(signal.SIG_UNBLOCK)

    os.register_at_fork(
        before=lambda: _mask_sigterm(signal.SIG_BLOCK),
        after_in_parent=lambda: _mask_sigterm(signal.SIG_UNBLOCK),
        after_in_child=restore_in_child,
    )


def _mask_sigterm(how: int) -> None:
    signal.pthread_sigmask(how, {signal.SIGTERM})


def _take_descriptors(job: dict[str, Any], rank: int) -> tuple[WorkerChannel, Messenger]:
    """Takes this worker's own descriptors out of the job's, and closes those that only another worker may have."""
    channels, mailboxes = job["channels"], job["mailboxes"]
    for other in set(range(job["workers"])) - {rank}:
        os.close(channels[other])
        os.close(mailboxes[other][0])
    for memory in job["store_memory"]:
        os.set_inheritable(memory, False)
    return WorkerChannel(channels[rank]), Messenger(rank, mailboxes[rank][0], [sending for _, sending in mailboxes])


def _open_store(path: str, workers: int) -> Store:
    from torch.distributed import FileStore

    return FileStore(path, workers)
