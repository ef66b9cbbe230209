"""The single worker of a job inside the calling process, for a debugger: breakpoints, stdin and Ctrl-C just work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.context import Context, call_entry
from gpipe_cli.launch.supervisor import Job, OnEvent

if TYPE_CHECKING:
    from torch.distributed import Store


def launch_inline(job: Job, on_event: OnEvent) -> Any:
    """Like `launch`, without a process. Exceptions of the entry point come through as they are.

    Raises:
        ConfigurationError: the job has more than one worker.
    """
    if job.workers != 1:
        raise ConfigurationError(
            f"a job of {job.workers} workers cannot run inside the command's process: let one worker run all cells"
        )
    context = Context(
        rank=0,
        world_size=1,
        local_rank=0,
        run_dir=job.run_dir.absolute(),
        open_store=_store_of_one,
        emit=lambda event: on_event({"rank": 0, **event}),
        stop_requested=lambda: False,
    )
    return call_entry(job.entry, context, job.config, job.threads, always_leave_group=True)


def _store_of_one() -> Store:
    from torch.distributed import HashStore

    return HashStore()
