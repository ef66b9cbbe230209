"""Defines the argument of a worker's entry point: its rank in the job, the store and the connection to the command."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.cpu import as_worker
from gpipe_cli.launch.messenger import LOCAL, Messenger
from gpipe_cli.position import Position

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

EntryFunction = Callable[["Context", dict[str, Any]], Any]  # what a worker runs: main(context, config)
# A peer that dies is noticed at once; this is for one that is merely slow (the first compilation, a full disk). Data
# may take longer to prepare: trainer/batches.py has a timeout of its own.
GROUP_TIMEOUT_SECONDS = 1800.0


@dataclass
class Context:
    """Describes one worker's place in the job and connects it to the command.

    Attributes:
        rank, world_size: among all workers of the job.
        local_rank: among the workers of this machine, for choosing a device.
        run_dir: the run directory, the same for all workers of one machine.
        open_store: opens the key-value store that the workers share; see `store`.
        emit: passes an event (a JSON object) to the command's `on_event`. Never waits, never fails.
        stop_requested: returns whether the user or the system asked for the end of the run. Workers may see the request
            at different times or not at all, so they have to agree.
        messenger: connects the workers where the command has started them all, on its own machine; None elsewhere.
        where: place of the worker in its step; kept up to date by the engine and the trainer, shown with an error.
    """

    rank: int
    world_size: int
    local_rank: int
    run_dir: Path
    open_store: Callable[[], Store]
    emit: Callable[[dict[str, Any]], None]
    stop_requested: Callable[[], bool]
    messenger: Messenger | None = None
    where: Position = field(default_factory=Position)

    @cached_property
    def store(self) -> Store:
        """Returns the key-value store that the workers share."""
        return self.open_store()

    def decide(
        self, name: str, own: str, choose: Callable[[list[str]], str], seconds: float = GROUP_TIMEOUT_SECONDS
    ) -> str:
        """Calls ``choose`` on rank 0 with the values of all ranks, and returns its result on every rank.

        It waits until all ranks have called it. Each reads one value; if all read from all, one store would answer W²
        times.

        Args:
            name: the same on all ranks, and used once.
            own: this rank's value.
            seconds: longest wait for the others.
        """
        from torch.distributed import PrefixStore

        store, key, wait = PrefixStore(name, self.store), str(self.rank), timedelta(seconds=seconds)
        store.set(key, own)
        if self.rank == 0:
            store.wait(keys := [str(rank) for rank in range(self.world_size)], wait)
            store.set("decided", choose([store.get(key).decode() for key in keys]))
        store.wait(["decided"], wait)
        return store.get("decided").decode()

    def init_process_group(
        self,
        backend: str | None = None,
        device: torch.device | None = None,
        timeout_seconds: float = GROUP_TIMEOUT_SECONDS,
    ) -> None:
        """Joins torch.distributed's default group.

        Args:
            backend: None: `LOCAL` (see local_group.py) where there is a messenger, else gloo.
            device: binds an NCCL group to its GPU from the start.
        """
        from torch import distributed

        if self.messenger is not None:
            from gpipe_cli.launch.local_group import register_local_backend

            register_local_backend(self.messenger)
        distributed.init_process_group(
            backend or ("gloo" if self.messenger is None else LOCAL),
            store=distributed.PrefixStore("default_group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device,
        )


def _leave_together(context: Context) -> None:
    """Waits until every rank has come to its end. Rank 0 leaves last, because it may serve the store."""
    from torch.distributed import PrefixStore

    context.decide("end", "", lambda _: "")
    store = PrefixStore("left", context.store)
    store.set(str(context.rank), "")
    if context.rank == 0:
        store.wait([str(rank) for rank in range(context.world_size)], timedelta(seconds=GROUP_TIMEOUT_SECONDS))


def call_entry(main: EntryFunction, context: Context, config: dict[str, Any], threads: int | None) -> Any:
    """Calls the entry point of a worker, and leaves the process group if it succeeds.

    After an exception the group is not left: that could hang, and the peers would report a lost connection before the
    cause is on record.
    """
    if not faulthandler.is_enabled():  # a crash in compiled code prints the Python calls that led to it
        faulthandler.enable(sys.__stderr__ or 2)
    with as_worker(threads):
        value = main(context, config)
    if context.messenger is None and context.world_size > 1:  # without the command no one else keeps them together
        _leave_together(context)
    leave_group()
    return value


def leave_group() -> None:
    """Leaves torch.distributed's default group, if this process has joined it."""
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
