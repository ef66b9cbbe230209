"""Defines the exchange: a float64 vector that all workers add up once per step.

Each slot is written by one worker and is 0 on the others. Adding zeros is exact, so every worker reads the same bits,
whatever K. Every decision taken from the sum (skip the update, stop, clip by this factor) is therefore the same on all
workers without another message.

The sum goes up a tree of all workers and down again (`tree.py`; docs/cluster.md has its seconds by workers).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MESSAGE_TAGS
from .tree import TIMEOUT_OF_GROUP, Tree


class StopRequested(Exception):
    """Raised on all workers at the same place when an evaluation ends early because the run was asked to stop."""


class Exchange:
    """Sums a vector of named fields over all workers.

    Args:
        fields: number of slots by name; the same on every worker.
        group: all workers, for CPU tensors; None when there is only one worker.

    Attributes:
        own: by field, the slots that this worker writes before `run`.
        total: by field, the sums of the last `run`.
        ended_at: when `run` last ended, in seconds of `time.perf_counter`; about the same moment on all workers.
    """

    def __init__(self, fields: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
        self._tree = Tree(group, MESSAGE_TAGS)  # beyond the tags of the pipeline's transport
        self._sizes = list(fields.values())
        self._vector = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.own: dict[str, Tensor] = dict(zip(fields, torch.split(self._vector, self._sizes), strict=True))
        self.total: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self.own.items()}
        self.ended_at = time.perf_counter()

    def run(self, timeout: timedelta = TIMEOUT_OF_GROUP) -> None:
        """Sums ``own`` of all workers into ``total`` and sets ``own`` to 0; every worker calls it at the same time."""
        total = self._tree.add_up(self._vector, timeout)
        self.total = dict(zip(self.own, torch.split(total, self._sizes), strict=True))
        self._vector.zero_()
        self.ended_at = time.perf_counter()


def run_unless_stopped(exchange: Exchange, stop_requested: Callable[[], bool]) -> None:
    """Runs the exchange, in which every worker also reports whether it was asked to stop.

    Args:
        exchange: with a field ``stop`` of one slot.

    Raises:
        StopRequested: on every worker, when at least one was asked to stop.
    """
    exchange.own["stop"][0] = float(stop_requested())
    exchange.run()
    if bool(exchange.total["stop"].any()):
        raise StopRequested


def never() -> bool:
    """Returns False: the default of `stop_requested`."""
    return False
