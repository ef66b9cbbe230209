"""Contenders on emulated accelerators: how their processes start, and the turns that they take."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from gpipe_cli.launch.context import Context

from .driver import Step
from .emulator import ACCELERATOR
from .stopwatch import StopWatch

Value = TypeVar("Value")

PRIORITY = 10  # of a real-time process


def join_emulation(context: Context, realtime: bool) -> StopWatch:
    """Makes this process one of the emulated workers; all of them call it.

    Args:
        realtime: shuts out the machine's other work (Linux, as root).

    Returns:
        What times the steps that the workers take together.
    """
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    context.init_process_group("gloo")
    return StopWatch(context.rank, context.world_size, ACCELERATOR.reset)


def warm_up(steps: Iterable[Step], watch: StopWatch) -> None:
    """Each step once, without sleeping."""
    ACCELERATOR.speed = 0.0
    for step in steps:
        watch.time(step)
    ACCELERATOR.speed = 1.0


def take_turns(
    steps: Mapping[str, Step | None],
    repetitions: int,
    watch: StopWatch,
    look: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each contender's steps, after a warm-up; none for one that is None.

    Args:
        steps: the same names in the same order on every worker, with None for the same of them.
        repetitions: timed steps of each; in every round each contender has one.
        look: is given the name of a contender whose step has just been timed.
    """

    def timed(name: str, step: Step) -> float:
        seconds = watch.time(step)
        look(name)
        return seconds

    running = {name: step for name, step in steps.items() if step is not None}
    warm_up(running.values(), watch)
    rounds = [{name: timed(name, step) for name, step in running.items()} for _ in range(repetitions)]
    return {name: [taken[name] for taken in rounds] if name in running else [] for name in steps}


def typical(seconds: Sequence[float]) -> float | None:
    """The median of a contender's steps; None of one that took none."""
    return statistics.median(seconds) if seconds else None


def of_all_workers(value: Value, workers: int) -> list[Value]:
    """Every worker's ``value``, in their order, on all of them."""
    values = [value] * workers
    if workers > 1:
        dist.all_gather_object(values, value)
    return values
