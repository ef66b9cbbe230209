"""Computes where the time of a step goes, as the paper's table 4 does, and the figures of a whole run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..pipeline.step import StepResult
from ..schedule.instruction import COMPUTE, InstructionLists, Op
from ..schedule.schedule import StepSchedule
from ..schedule.simulate import Timeline, simulate

Durations = Mapping[tuple[Op, int], float]  # seconds of one instruction, by kind and cell; kinds in `COMPUTE` only
SHARES = ("computation", "recomputation", "bubble", "load_imbalance", "setup", "weight_update")
WARM_UP = 2  # steps left out, in which allocators, kernels and shapes are used for the first time
RECENT = 200  # number of steps that the figures are computed over


@dataclass
class Totals:
    """Collects the figures of steps for the summary.

    Attributes:
        first_step_at: `time.monotonic` when the first step had ended.
    """

    first_step_at: float | None = None
    _peak_memory: int = 0  # of any worker, in bytes
    _steps: int = 0
    _recent: deque[StepResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, step: StepResult) -> None:
        """Adds one training step."""
        if self.first_step_at is None:
            self.first_step_at = time.monotonic()
        if self._steps == WARM_UP:
            self._recent.clear()
        self._steps += 1
        self._recent.append(step)
        self._peak_memory = max(self._peak_memory, int(max(step.numbers["memory_bytes"])))

    def figures(self, schedule: StepSchedule, table: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns means over recent steps: examples/s, the bubble as measured and as predicted, the shares of a step.

        The prediction simulates the schedule with the mean measured times of its instructions.

        Args:
            table: a row for each cell; the returned "cells" are these rows with the seconds of each kind of work.
        """
        found: dict[str, Any] = dict.fromkeys(("examples_per_second", "bubble", "bubble_predicted", "breakdown"))
        steps, cells = self._recent, list[dict[str, float]]()
        if steps:
            lists = schedule.lists(len(steps[-1].plan.signatures))
            by_cell = zip(*(step.cells for step in steps), strict=True)
            cells = [{kind: fmean(times[kind] for times in each) for kind in each[0]} for each in by_cell]
            seconds = fmean(step.seconds for step in steps)
            updates = [fmean(step.numbers["update"]) for step in steps]
            found["examples_per_second"] = fmean(step.plan.examples for step in steps) / seconds
            found["bubble"] = fmean(step.bubble for step in steps)
            shares, found["bubble_predicted"] = mean_breakdown(lists, schedule.placement, cells, updates, seconds)
            found["breakdown"] = shares
        rows = [{**row, "seconds": cells[number] if cells else None} for number, row in enumerate(table)]
        return {**found, "cells": rows, "peak_memory_bytes": self._peak_memory}


def mean_breakdown(
    lists: InstructionLists,
    placement: Sequence[int],
    cells: Sequence[Mapping[str, float]],
    updates: Sequence[float],
    step_seconds: float,
) -> tuple[dict[str, float], float]:
    """Returns shares of the workers' time in a step, and the bubble of the schedule with the measured durations.

    The names are Table 4's; the paper does not define them, so these definitions are ours. The shares add up to 1:

        computation     forward and backward
        recomputation   forward computed again in backward (section 2.3)
        bubble          what the schedule itself leaves idle: its simulation with the same work spread evenly over the
                        workers and with messages that take no time. Early recompute is in it, so it can be less than
                        (K-1)/(M+K-1)
        load_imbalance  what the simulation with the cells' own measured times leaves idle beyond that
        setup           all other time: sending and messages under way, reading data, the exchange of reports and
                        plans, sums over replicas, and unsteady times
        weight_update   clipping, optimizer, moving averages; the mean over the workers

    Args:
        lists: one list of instructions per worker, those that ran.
        placement: worker of each cell.
        cells: seconds that a step spent in each cell, by the name of the kind of instruction in small letters.
        updates: seconds of every worker's weight update.
        step_seconds: duration of the whole step, with its update and the wait for data.
    """
    counts = count_computations(lists)
    durations = {(op, cell): cells[cell][op.name.lower()] / count for (op, cell), count in counts.items()}
    whole, update = len(lists) * step_seconds, len(lists) * fmean(updates)
    busy = sum(count * durations[key] for key, count in counts.items())
    again = sum(count * durations[key] for key, count in counts.items() if key[0] is Op.RECOMPUTE)
    own = simulate_with(lists, placement, durations)
    even = simulate_with(lists, placement, even_durations(lists, placement, durations))
    # Measured times vary and the simulation uses their means, so limit each share to the time that is left.
    left = max(0.0, whole - busy - update)
    bubble = min(left, _idle_seconds(even))
    imbalance = min(left - bubble, max(0.0, _idle_seconds(own) - bubble))
    seconds = (busy - again, again, bubble, imbalance, left - bubble - imbalance, update)
    total = sum(seconds)  # more than `whole` if computation and update together seem longer than the step
    return {name: spent / total for name, spent in zip(SHARES, seconds, strict=True)}, own.bubble


def simulate_with(lists: InstructionLists, placement: Sequence[int], durations: Durations) -> Timeline:
    """Simulates the lists with these durations; messages take no time."""
    return simulate(lists, placement, lambda instruction: durations[instruction.op, instruction.cell])


def _idle_seconds(timeline: Timeline) -> float:
    """Returns the idle seconds of all workers together, between a step's begin and its end."""
    return len(timeline.spans) * timeline.span - sum(timeline.busy)


def count_computations(lists: InstructionLists) -> Counter[tuple[Op, int]]:
    """Counts the computations of each kind and cell in a step."""
    return Counter((i.op, i.cell) for instructions in lists for i in instructions if i.op in COMPUTE)


def even_durations(
    lists: InstructionLists, placement: Sequence[int], durations: Durations
) -> dict[tuple[Op, int], float]:
    """Returns durations with the same work spread evenly: in each kind all workers take equally long.

    A kind that some workers do not have at all (recompute, in the last worker of 1f1b) is spread over the others.
    """
    counts, cells_of_worker = count_computations(lists), Counter(placement)
    even: dict[tuple[Op, int], float] = {}
    for op in COMPUTE:
        keys = [key for key in counts if key[0] is op]
        workers = {placement[cell] for _, cell in keys}
        each = sum(durations[key] for key in keys) / len(workers) if workers else 0.0
        even |= {(op, cell): each / cells_of_worker[placement[cell]] for _, cell in keys}
    return even
