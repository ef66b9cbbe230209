"""Computes figures over a whole run: rates, the measured bubble, and the bubble that the schedule predicts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..distributed.pipeline import Pipeline
from ..schedule.instruction import InstructionLists
from .breakdown import Breakdown, mean_breakdown, predicted_bubble
from .records import TrainedStep

WARM_UP = 2  # steps left out, in which allocators, kernels and shapes are used for the first time
RECENT = 200  # number of steps that the figures are computed over


@dataclass
class Totals:
    """Collects the figures of steps for the summary.

    Attributes:
        first_step_at: time.time() when the first step had ended.
        peak_memory: of any worker, in bytes.
        steps: number of steps added.
    """

    first_step_at: float | None = None
    peak_memory: int = 0
    steps: int = 0
    _recent: deque[TrainedStep] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, step: TrainedStep) -> None:
        """Adds one training step."""
        if self.first_step_at is None:
            self.first_step_at = time.time()
        if self.steps == WARM_UP:
            self._recent.clear()
        self.steps += 1
        self._recent.append(step)
        self.peak_memory = max(self.peak_memory, int(max(step.report.numbers["memory_bytes"])))

    def figures(self, pipeline: Pipeline) -> dict[str, Any]:
        """Returns means for the summary: the bubble as measured and as the schedule predicts it, the shares of a step.

        The prediction simulates the schedule with the mean measured times of its instructions.
        """
        if not self._recent:
            return dict.fromkeys(("examples_per_second", "bubble", "bubble_predicted", "breakdown"))
        lists, placement, breakdown = self._lists(pipeline), pipeline.placement, self.breakdown(pipeline)
        return {
            "examples_per_second": sum(step.plan.examples for step in self._recent)
            / sum(step.seconds for step in self._recent),
            "bubble": fmean(step.report.bubble for step in self._recent),
            "bubble_predicted": predicted_bubble(lists, placement, self._cell_means()),
            "breakdown": None if breakdown is None else breakdown.shares(),
        }

    def breakdown(self, pipeline: Pipeline) -> Breakdown | None:
        """Returns the shares of a step (paper, table 4), from the mean times."""
        if not self._recent:
            return None
        updates = [fmean(step.report.updates) for step in self._recent]
        seconds = fmean(step.seconds for step in self._recent)
        return mean_breakdown(self._lists(pipeline), pipeline.placement, self._cell_means(), updates, seconds)

    def _lists(self, pipeline: Pipeline) -> InstructionLists:
        return pipeline.training_lists(len(self._recent[-1].plan.signatures))

    def with_times(self, table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the table of the cells with the mean seconds of each per step."""
        means = self._cell_means()
        return [{**row, "seconds": means[number] if number < len(means) else None} for number, row in enumerate(table)]

    def _cell_means(self) -> list[dict[str, float]]:
        if not self._recent:
            return []
        by_cell = zip(*(step.report.cells for step in self._recent), strict=True)
        return [{kind: fmean(times[kind] for times in steps) for kind in steps[0]} for steps in by_cell]
