"""Times a step that several workers take together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from gpipe_cli.distributed.exchange import Exchange

START_AHEAD = 0.05  # seconds from the exchange to the common start


class StopWatch:
    """A common start and the end of the last worker.

    Args:
        before: called after the exchange, before the start.
    """

    def __init__(self, rank: int, workers: int, before: Callable[[], None] = lambda: None) -> None:
        self._rank, self._before = rank, before
        self._exchange = Exchange({"start": 1, "end": workers}, dist.group.WORLD if workers > 1 else None)

    def time(self, step: Callable[[], object]) -> float:
        """Seconds from the common start to the end of the last worker."""
        if self._rank == 0:
            self._exchange.own["start"][0] = time.perf_counter() + START_AHEAD
        self._exchange.run()
        start = float(self._exchange.total["start"][0])
        self._before()
        time.sleep(max(0.0, start - time.perf_counter()))
        step()
        self._exchange.own["end"][self._rank] = time.perf_counter()
        self._exchange.run()
        return float(self._exchange.total["end"].max()) - start
