"""Finds the largest model, or mini-batch, that fits: doubles one key of the configuration, then bisects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ...config import FREE_FORM, Settings
from ...errors import ConfigurationError
from ..options import Options
from ..plan import Plan
from ..planner import Planner
from .attempts import Attempts

MOST_DOUBLINGS = 20
MOST_REFUSED = 64  # neighbouring values that are tried, each refused, before none of them is taken to be accepted


def grow(settings: Settings, options: Options, key: str) -> Plan:
    """Returns the plan with the largest whole number for ``key``, such as model.L, that fits.

    Values that cannot be planned, as a number of layers that is no multiple of 3, are passed over, up to `MOST_REFUSED`
    in a row.

    Raises:
        ConfigurationError: no such key, not even the smallest value fits, or no value is too large.
    """
    section, _, name = key.partition(".")
    start = getattr(settings, section, {}).get(name) if section in FREE_FORM else None
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ConfigurationError(f"plan.grow={key}: use a key with a whole number, such as model.L or data.batch_size")
    growth = _Growth(settings, options, section, name)
    low, high = growth.double(start)
    while high - low > 1:
        middle = (low + high) // 2
        value = growth.first_accepted(range(middle, high))
        if value is not None and growth.plans[value].fits:
            low = value
        else:
            high = middle if value is None else value
    if not low:
        raise growth.attempts.error(f"plan.grow={key}: ")
    return replace(growth.plans[low], found={key: low}, tried=growth.attempts.count)


class _Growth:
    """Makes and keeps plans by the value of one key."""

    def __init__(self, settings: Settings, options: Options, section: str, name: str) -> None:
        self._settings, self._options, self._section, self._name = settings, options, section, name
        self._refused: dict[int, ConfigurationError] = {}
        self.plans: dict[int, Plan] = {}
        self.attempts = Attempts()

    def double(self, start: int) -> tuple[int, int]:
        """Returns a value that fits (0: unknown) and a larger one that does not, or is not accepted.

        Raises:
            ConfigurationError: neither ``start`` nor a neighbour is accepted, or every value fits.
        """
        low = 0
        for doublings in range(MOST_DOUBLINGS):
            value = self.first_accepted(range(start << doublings, start << doublings + 1))
            if value is None and not low:
                raise self._refused[start]
            if value is None or not self.plans[value].fits:
                return low, value or start << doublings
            low = value
        raise ConfigurationError(
            f"plan.grow={self._section}.{self._name}: all values up to {low} fit: use a key that makes the model or "
            "its micro-batches larger, such as model.L or data.batch_size"
        )

    def first_accepted(self, values: range) -> int | None:
        """Returns the first value that is accepted; None where all, or the first `MOST_REFUSED`, are refused."""
        return next((value for value in values[:MOST_REFUSED] if self._plan(value)), None)

    def _plan(self, value: int) -> Plan | None:
        """Returns the plan for a value, or keeps the reason why there is none."""
        if value not in self.plans and value not in self._refused:
            section = {**getattr(self._settings, self._section), self._name: value}
            settings = replace(self._settings, **cast(Any, {self._section: section}))
            try:
                self.plans[value] = Planner(settings, self._options).plan()
                self.attempts.add(self.plans[value])
            except ConfigurationError as error:
                self._refused[value] = error
        return self.plans.get(value)
