"""One clock for all workers: what another machine's clock shows when ours shows something, by asking it some times.

The monotonic clock starts with the machine, so the processes of one machine share it, and those of two do not.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .world import World

PINGS = 8
PING = (1 << 30) + 2  # message tag, beyond those of the exchange
_BOOT = Path("/proc/sys/kernel/random/boot_id")
Clock = Callable[[], float]


class Ping(NamedTuple):
    """One question to another clock: ours when it left, the other's answer, ours when that arrived; seconds."""

    sent: float
    answered: float
    received: float


def offset(pings: Sequence[Ping]) -> float:
    """What to add to the other clock to get ours.

    The quickest question is the best one: the answer was given between its departure and its return, so the middle of
    the two is wrong by half of the round trip at most.

    Raises:
        ValueError: there are no pings.
    """
    best = min(pings, key=lambda ping: ping.received - ping.sent)
    return (best.sent + best.received) / 2 - best.answered


def clock_name() -> str:
    """Equal for processes whose monotonic clocks are the same."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def clock_offset(world: World, name: str | None = None, clock: Clock = time.perf_counter) -> float:
    """What this worker has to add to its clock to get rank 0's; every worker calls it at the same time.

    Args:
        name: of this worker's clock, as `clock_name` gives it; nobody asks a clock of rank 0's name.
        clock: this worker's.
    """
    if world.everyone is None:
        return 0.0
    names = world.gather_everyone(clock_name() if name is None else name)
    others = [rank for rank, theirs in enumerate(names) if theirs != names[0]]
    if world.rank == 0:
        for rank in others:
            found = torch.tensor([offset([_ask(world, rank, clock) for _ in range(PINGS)])], dtype=torch.float64)
            dist.send(found, rank, group=world.everyone, tag=PING)
    elif world.rank in others:
        for _ in range(PINGS):
            _answer(world, clock)
        mine = torch.zeros(1, dtype=torch.float64)
        dist.recv(mine, 0, group=world.everyone, tag=PING)
        return float(mine)
    return 0.0


def _ask(world: World, rank: int, clock: Clock) -> Ping:
    answer = torch.zeros(1, dtype=torch.float64)
    sent = clock()
    dist.send(answer, rank, group=world.everyone, tag=PING)
    dist.recv(answer, rank, group=world.everyone, tag=PING)
    return Ping(sent, float(answer), clock())


def _answer(world: World, clock: Clock) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    dist.recv(question, 0, group=world.everyone, tag=PING)
    dist.send(torch.tensor([clock()], dtype=torch.float64), 0, group=world.everyone, tag=PING)
