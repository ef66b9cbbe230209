"""The largest model, or mini-batch, that fits: grows one key of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from ..config import FREE_FORM, Settings
from ..errors import ConfigurationError
from .answer import Answer
from .options import Options
from .plan import Plan
from .planner import Planner, Say
from .shortfall import Shortfall

MOST_DOUBLINGS = 40
WITHOUT_EFFECT = 4  # doublings in a row that change nothing in memory: more will not, either


def grow(settings: Settings, options: Options, key: str, say: Say) -> Answer:
    """The largest whole number for ``key`` (such as model.L) whose plan fits, by doubling and then halving the rest.

    Values that the model refuses, as a number of layers that is no multiple of 3, are passed over downwards.

    Raises:
        ConfigurationError: no such key, not even the smallest value fits, or no value is too large.
    """
    section, _, name = key.partition(".")
    start = getattr(settings, section, {}).get(name) if section in FREE_FORM else None
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ConfigurationError(f"plan.grow={key}: use a key with a whole number, such as model.L or data.batch_size")
    attempts = _Attempts(settings, options, section, name, say)
    low = start
    while low and not attempts.fits(low):
        low //= 2
    if not low:
        raise attempts.nothing()
    low = attempts.double(low)
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempts.fits(middle) else (low, middle)
    found = attempts.plans[low]
    assert found is not None
    return Answer(found, {key: attempts.used[low]}, len(attempts.plans))


class _Attempts:
    """Plans by the value of one key."""

    def __init__(self, settings: Settings, options: Options, section: str, name: str, say: Say) -> None:
        self._settings, self._options, self._section, self._name = settings, options, section, name
        self._say, self._shortfall = say, Shortfall(settings)
        self._limit = 0.0
        self.plans: dict[int, Plan | None] = {}
        self.used: dict[int, int] = {}

    @property
    def _asked(self) -> str:
        return f"plan.grow={self._section}.{self._name}"

    def fits(self, value: int) -> bool:
        """Whether the largest allowed value up to this one fits."""
        if value not in self.plans:
            self.plans[value] = self._plan(value)
        plan = self.plans[value]
        return plan is not None and plan.fits

    def double(self, low: int) -> int:
        """The last of ``low``, twice ``low``, … that fits.

        Raises:
            ConfigurationError: the key does not change what the devices hold, or every value fits.
        """
        unchanged = 0
        for _ in range(MOST_DOUBLINGS):
            if not self.fits(2 * low):
                return low
            unchanged = unchanged + 1 if self._held(2 * low) == self._held(low) else 0
            low *= 2
            if unchanged == WITHOUT_EFFECT:
                raise ConfigurationError(
                    f"{self._asked}: from {low >> unchanged} to {low} it does not change what the devices hold: use a "
                    "key that makes the model or its micro-batches larger, such as model.L or data.batch_size"
                )
        raise ConfigurationError(f"{self._asked}: all values up to {low} fit, so there is no largest one to find")

    def nothing(self) -> ConfigurationError:
        """What to say when not even the smallest value fits."""
        return self._shortfall.error(self._limit, f"{self._asked}: ")

    def _held(self, value: int) -> list[float]:
        """Bytes of each device."""
        plan = self.plans[value]
        return [] if plan is None else [worker.total for worker in plan.workers_plan]

    def _plan(self, value: int) -> Plan | None:
        for allowed in self._downwards(value):
            section = {**getattr(self._settings, self._section), self._name: allowed}
            settings = replace(self._settings, **cast(Any, {self._section: section}))
            try:
                planner = Planner(settings, self._options, self._say)
                self._limit = planner.limit
                plan = planner.plan()
            except ConfigurationError as error:
                self._shortfall.refused(error)
                continue
            self._shortfall.made(plan)
            self.used[value] = allowed
            return plan
        return None

    def _downwards(self, value: int) -> Iterator[int]:
        yield from (value - less for less in range(12) if value - less >= 1)
