"""The schedules of a run, each made and checked once: the engine executes them, the simulator times them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .forecast import Forecast
from .schedule import Instruction, forward_only, schedule
from .validate import validate


class RunSchedules:
    """Instruction lists by number of micro-batches.

    Args:
        kind: ``pipeline.schedule``.
        placement: worker of each cell.
        remat: ``pipeline.remat``.
    """

    def __init__(self, kind: str, placement: Sequence[int], remat: str) -> None:
        self.kind, self.placement, self.remat = kind, tuple(placement), remat
        self.training = cache(self._training)
        self.forward = cache(self._forward)
        self.forecast = cache(self._forecast)

    def _training(self, micro_batches: int) -> list[list[Instruction]]:
        """One list per worker for a training step."""
        lists = schedule(self.kind, self.placement, micro_batches, self.remat)
        validate(lists, self.placement, micro_batches, self.remat)
        return lists

    def _forward(self, micro_batches: int) -> list[list[Instruction]]:
        """One list per worker for evaluation or generation."""
        lists = forward_only(self.placement, micro_batches)
        validate(lists, self.placement, micro_batches)
        return lists

    def _forecast(self, micro_batches: int) -> Forecast:
        """What a training step takes, by the times of its instructions."""
        return Forecast(self.training(micro_batches), self.placement)
