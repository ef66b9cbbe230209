"""Tells where every worker is, if none has gone on for some minutes though none has died."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist
from torch._C import _distributed_c10d

from ..launch.context import Context
from ..launch.report import describe_place

_LOOKS = 20  # at the worker's place, in the time after which a hang is told


@contextmanager
def hangs_told(context: Context, minutes: float | None) -> Iterator[None]:
    """Watches this worker while the context lasts, in a thread of its own; every worker does.

    Workers meet in every step, so all stand still soon after one does. Then rank 0 prints once where each of them is.

    Args:
        minutes: time without any progress after which that is printed; None: never.
    """
    ended = Event()
    if minutes is not None:
        Thread(target=_watch, args=(context, 60 * minutes, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(context: Context, seconds: float, ended: Event) -> None:
    """Tells the workers' places once if this worker's has not changed for so many seconds."""
    seen, since = b"", time.monotonic()
    while not ended.wait(seconds / _LOOKS):
        now = bytes(context.where.memory)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= seconds:
            _tell(context, seconds)
            return


def _tell(context: Context, seconds: float) -> None:
    """Writes this worker's place into the store; rank 0 waits for those of the others and prints all."""
    store = dist.PrefixStore("hang", context.store)
    store.set(str(context.rank), json.dumps(context.where.known()))
    record = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)  # NCCL's flight recorder
    recorded = record is not None and dist.is_initialized() and dist.get_backend() == "nccl"
    if record is not None and recorded:
        (context.run_dir / f"nccl_{context.rank}.json").write_bytes(record())
    if context.rank == 0:
        until = time.monotonic() + seconds / 2  # others may have stood still a little later
        places = [f"worker {rank}: {_place_of(store, rank, until)}" for rank in range(context.world_size)]
        recorder = f"\nNCCL's flight recorder: {context.run_dir}/nccl_*.json" if recorded else ""
        text = f"no progress for {seconds / 60:g} minutes (launch.hang_minutes), and no worker has died:\n  "
        context.emit({"kind": "warning", "text": text + "\n  ".join(places) + recorder})


def _place_of(store: dist.Store, rank: int, until: float) -> str:
    """Returns the place that a worker has written, or will have until a moment of the monotonic clock."""
    try:
        store.wait([str(rank)], timedelta(seconds=max(1.0, until - time.monotonic())))
    except RuntimeError:  # the store's timeout, of any kind of store
        return "no answer: it is stopped, or goes on"
    return describe_place(json.loads(store.get(str(rank)))) or "at no known place"
