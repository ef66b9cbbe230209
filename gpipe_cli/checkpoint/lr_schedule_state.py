"""Saves a learning rate schedule as the number of its steps, and restores it by taking them again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from .files import Json

GROUPS = "optimizer_groups"


class LRScheduleState:
    """Saves a learning rate schedule and restores it, bit for bit.

    Its number of steps decides all that it changes in the optimizer's groups: learning rates, and momentum or betas
    with torch's OneCycleLR and CyclicLR.

    Args:
        lr_schedule: before its first step.
        optimizer: its optimizer.
    """

    def __init__(self, lr_schedule: LRScheduler, optimizer: Optimizer) -> None:
        self._lr_schedule, self._optimizer = lr_schedule, optimizer

    def save(self) -> dict[str, Json]:
        """Returns the number of steps and the learning rate of each group as values for a manifest."""
        schedule = self._lr_schedule
        counted = schedule._schedulers[0] if isinstance(schedule, ChainedScheduler) else schedule
        return {"last_epoch": counted.last_epoch, GROUPS: [{"lr": rate} for rate in self._rates()]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores schedule and groups to the state that `save` returned.

        Raises:
            ValueError: the learning rates are not those that were saved.
        """
        counted = saved if "last_epoch" in saved else saved["_schedulers"][0]  # earlier releases' ChainedScheduler
        steps, before = counted["last_epoch"], [group["lr"] for group in saved[GROUPS]]
        self.replay(steps)
        if not all(map(math.isclose, self._rates(), before)):
            raise ValueError(f"the learning rates after {steps} steps were {before}, now {self._rates()}")

    def replay(self, steps: int) -> None:
        """Brings schedule and groups to where the present configuration has them after so many steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there were no updates in between
            for _ in range(steps):
                self._lr_schedule.step()

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]
