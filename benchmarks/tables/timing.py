"""Times steps that several workers run together, and lets contenders take turns."""

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from gpipe_cli.distributed.world import Exchange

START_AHEAD = 0.05  # seconds from the exchange to the common start


class StopWatch:
    """Times a step from a start common to all workers to the end of the last worker.

    Args:
        before: called on every worker after the exchange, before the start.
    """

    def __init__(self, rank: int, workers: int, before: Callable[[], None] = lambda: None) -> None:
        self._rank, self._before = rank, before
        self._exchange = Exchange({"start": 1, "end": workers}, dist.group.WORLD if workers > 1 else None)

    def time(self, step: Callable[[], object]) -> float:
        """Returns the seconds of ``step``; all workers call it together."""
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


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 0) -> dict[str, list[float]]:
    """Returns the seconds that each contender reports, by round.

    Each contender has one turn per round, so that disturbances of the machine reach all of them alike; every other
    round runs backwards.

    Args:
        contenders: functions that run one step and return its seconds; the same names in one order on every worker.
        warm_up: rounds before those that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name in reversed(list(contenders)) if number % 2 else contenders:
            taken = contenders[name]()
            if number >= 0:
                seconds[name].append(taken)
    return seconds
