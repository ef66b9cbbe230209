"""Finds the largest model, or mini-batch, that fits: doubles one key of the configuration, then bisects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from ...config import FREE_FORM, Settings
from ...errors import ConfigurationError
from ..options import Options
from ..plan import Plan
from ..planner import Planner, Say
from .attempts import Attempts

MOST_DOUBLINGS = 40
WITHOUT_EFFECT = 4  # doublings in a row that change no device's memory: more will not change it either
MOST_REFUSED = 64  # neighbouring values that are tried, each refused, before none of them is taken to be accepted
LATE = 5  # a value refused only after its layers were measured counts as so many, because that takes longer


def grow(settings: Settings, options: Options, key: str, say: Say) -> Plan:
    """Returns the plan with the largest whole number for ``key``, such as model.L, that fits.

    Values that cannot be planned, as a number of layers that is no multiple of 3, are passed over. A note of the plan
    says so where larger values were refused and not every one was tried.

    Raises:
        ConfigurationError: no such key, not even the smallest value fits, or no value is too large.
    """
    section, _, name = key.partition(".")
    start = getattr(settings, section, {}).get(name) if section in FREE_FORM else None
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ConfigurationError(f"plan.grow={key}: use a key with a whole number, such as model.L or data.batch_size")
    growth = _Growth(settings, options, section, name, say)
    low, too_large = growth.double(start)
    high = 2 * low if too_large is None else too_large
    while high - low > 1:
        middle = (low + high) // 2
        value = growth.first(chain(range(middle, high), range(middle - 1, low, -1)))
        if value is None and too_large is not None:
            break  # accepted values lie too far apart to be found
        if value is not None and growth.fits(value):
            low = value
        else:  # too large for the devices, or for the model
            high = middle if value is None else value
            too_large = value
    return growth.answer(low, too_large)


class _Growth:
    """Keeps the plans by the value of one key, and the errors of the values that cannot be planned."""

    def __init__(self, settings: Settings, options: Options, section: str, name: str, say: Say) -> None:
        self._settings, self._options, self._section, self._name = settings, options, section, name
        self._say, self._attempts = say, Attempts(settings)
        self._plans: dict[int, Plan] = {}
        self._refused: dict[int, ConfigurationError] = {}
        self._prefix = f"plan.grow={section}.{name}: "

    def fits(self, value: int) -> bool:
        """Returns whether this value, which was accepted, fits."""
        return self._plans[value].fits

    def first(self, values: Iterable[int]) -> int | None:
        """Returns the first value that is accepted; None where all, or `MOST_REFUSED` of the new ones, are refused."""
        patience = MOST_REFUSED
        for value in values:
            if value not in self._plans and value not in self._refused:
                patience -= self._try(value)
            if value in self._plans:
                return value
            if patience <= 0:
                break
        return None

    def double(self, start: int) -> tuple[int, int | None]:
        """Returns a value that fits (0: unknown) and a larger one that does not (None: no larger one is accepted).

        Raises:
            ConfigurationError: neither ``start`` nor a smaller value is accepted, the key does not change what the
                devices hold, or every value fits.
        """
        low = self.first(range(start, 0, -1))
        if low is None:
            raise self._refused[start]
        if not self.fits(low):
            return 0, low
        fitting = [low]
        for _ in range(MOST_DOUBLINGS):
            larger = self.first(range(2 * low, 4 * low))
            if larger is None or not self.fits(larger):
                return low, larger
            low = larger
            fitting.append(low)
            last = fitting[-1 - WITHOUT_EFFECT :]
            if len(last) > WITHOUT_EFFECT and len({self._memory(value) for value in last}) == 1:
                raise ConfigurationError(
                    f"{self._prefix}from {last[0]} to {low} it does not change what the devices hold: use a "
                    "key that makes the model or its micro-batches larger, such as model.L or data.batch_size"
                )
        raise ConfigurationError(f"{self._prefix}all values up to {low} fit, and no larger one was tried")

    def answer(self, low: int, too_large: int | None) -> Plan:
        """Returns the plan of ``low``, the largest value that fits.

        Raises:
            ConfigurationError: ``low`` is 0: not even the smallest value fits.
        """
        if not low:
            raise self._attempts.error(self._prefix)
        plan = self._plans[low]
        notes = [*plan.notes, *self._notes_on_refused(low, too_large)]
        return replace(plan, notes=notes, found={f"{self._section}.{self._name}": low}, tried=self._attempts.count)

    def _notes_on_refused(self, low: int, too_large: int | None) -> list[str]:
        refused = [value for value in self._refused if value > low and (too_large is None or value < too_large)]
        reason = f"({self._refused[min(refused)]})" if refused else ""
        if too_large is None:
            count = len(refused)
            return [f"{self._prefix}no larger value is accepted, of {count} tried up to {max(refused)} {reason}"]
        between = too_large - low - 1
        if len(refused) == between:
            return []
        tried = f"{len(refused)} of the {between} values between {low} and {too_large}"
        return [f"{self._prefix}{tried} were tried and refused {reason}; of the others some may fit"]

    def _memory(self, value: int) -> tuple[float, ...]:
        """Returns the bytes of each device."""
        return tuple(worker.total for worker in self._plans[value].workers_plan)

    def _try(self, value: int) -> int:
        """Plans a value, or keeps the reason why it cannot be planned; returns what that costs of `MOST_REFUSED`."""
        section = {**getattr(self._settings, self._section), self._name: value}
        settings = replace(self._settings, **cast(Any, {self._section: section}))
        cost = 1
        try:
            planner = Planner(settings, self._options, self._say)
            cost = LATE
            self._plans[value] = planner.plan()
        except ConfigurationError as error:
            self._refused[value] = error
            return cost
        self._attempts.add(self._plans[value])
        return 0
