"""The largest model, or mini-batch, that fits: grows one key of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import gcd, isqrt
from typing import Any, cast

from ...config import FREE_FORM, Settings
from ...errors import ConfigurationError
from ..answer import Answer
from ..options import Options
from ..plan import Plan
from ..planner import Planner, Say
from .shortfall import Shortfall

MOST_DOUBLINGS = 40
WITHOUT_EFFECT = 4  # doublings in a row that change nothing in memory: more will not, either
JUST_BELOW = 12  # values below one that was refused that are tried first
MOST_REFUSED = 64  # values that are tried in one place, each refused, before the others there are left untried
LATE = 5  # so many of them is a value that is refused only once its layers have been measured, which takes far longer


def grow(settings: Settings, options: Options, key: str, say: Say) -> Answer:
    """The largest whole number for ``key`` (such as model.L) whose plan fits, by doubling and then halving the rest.

    Values that cannot be planned, as a number of layers that is no multiple of 3, are passed over. Where larger ones
    than the answer were passed over and not every one was tried, a note of its plan says so.

    Raises:
        ConfigurationError: no such key, not even the smallest value fits, or no value is too large.
    """
    section, _, name = key.partition(".")
    start = getattr(settings, section, {}).get(name) if section in FREE_FORM else None
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ConfigurationError(f"plan.grow={key}: use a key with a whole number, such as model.L or data.batch_size")
    attempts = _Attempts(settings, options, section, name, say)
    low, high = attempts.bracket(start)
    while high is not None and (middle := attempts.first(_between(low, high))) is not None:
        low, high = (middle, high) if attempts.fits(middle) else (low, middle)
    return attempts.answer(low, high)


class _Attempts:
    """Plans by the value of one key, and the refusals of those values that cannot be planned."""

    def __init__(self, settings: Settings, options: Options, section: str, name: str, say: Say) -> None:
        self._settings, self._options, self._section, self._name = settings, options, section, name
        self._say, self._shortfall = say, Shortfall(settings)
        self._limit = 0.0
        self._plans: dict[int, Plan] = {}
        self._refused: dict[int, ConfigurationError] = {}
        self._patience = 0

    @property
    def _asked(self) -> str:
        return f"plan.grow={self._section}.{self._name}"

    def fits(self, value: int) -> bool:
        """Whether this value, which is accepted, fits."""
        return self._plans[value].fits

    def first(self, candidates: Iterable[int]) -> int | None:
        """The first of them that is accepted; None where all are refused, or more than patience allows."""
        self._patience = MOST_REFUSED
        for value in candidates:
            if value not in self._plans and value not in self._refused:
                self._try(value)
            if value in self._plans:
                return value
            if self._patience <= 0:
                break
        return None

    def bracket(self, start: int) -> tuple[int, int | None]:
        """A value that fits (0: none is known) and a larger one that does not (None: no larger one is accepted).

        Raises:
            ConfigurationError: neither ``start`` nor a smaller value is accepted, the key does not change what the
                devices hold, or every value fits.
        """
        halves = (start >> power for power in range(1, start.bit_length()))
        first = self.first(chain(range(start, max(start - JUST_BELOW, 0), -1), halves, range(start, 0, -1)))
        if first is None:
            raise self._refused[start]
        return self._double(first) if self.fits(first) else (0, first)

    def _double(self, low: int) -> tuple[int, int | None]:
        """Likewise, from a value that fits."""
        since = low  # the smallest value from which on the devices hold the same
        for _ in range(MOST_DOUBLINGS):
            larger = self._larger(low)
            if larger is None or not self.fits(larger):
                return low, larger
            since = since if self._held(larger) == self._held(low) else larger
            low = larger
            if low >= since << WITHOUT_EFFECT:
                raise ConfigurationError(
                    f"{self._asked}: from {since} to {low} it does not change what the devices hold: use a "
                    "key that makes the model or its micro-batches larger, such as model.L or data.batch_size"
                )
        raise ConfigurationError(f"{self._asked}: all values up to {low} fit, and no larger one was tried")

    def _larger(self, low: int) -> int | None:
        """An accepted value above this one, twice as large if possible; None where none was found."""
        step = gcd(*(value - low for value in self._plans)) or low  # of accepted values, as far as they tell it
        twice = low + step * max(low // step, 1)
        just_below = range(twice, max(twice - JUST_BELOW, low), -1)
        farther = (low << power for power in range(2, WITHOUT_EFFECT + 1))
        return self.first(chain(just_below, farther, _between(low, 2 * low), range(2 * low, 4 * low)))

    def answer(self, low: int, high: int | None) -> Answer:
        """With ``low``, if there is one, as the largest value that fits.

        Raises:
            ConfigurationError: not even the smallest value fits.
        """
        if not low:
            raise self._shortfall.error(self._limit, f"{self._asked}: ")
        plan = self._plans[low]
        plan = replace(plan, notes=[*plan.notes, *self._passed_over(low, high)])
        return Answer(plan, {f"{self._section}.{self._name}": low}, len(self._plans))

    def _passed_over(self, low: int, high: int | None) -> list[str]:
        """What is to be said of the values between the largest that fits and the smallest that does not."""
        refused = [value for value in self._refused if value > low and (high is None or value < high)]
        reason = f"({self._refused[min(refused)]})" if refused else ""
        if high is None:
            largest = max(refused)
            return [f"{self._asked}: no larger value is accepted, of {len(refused)} tried up to {largest} {reason}"]
        between = high - low - 1
        if len(refused) == between:
            return []
        tried = f"{len(refused)} of the {between} values between {low} and {high}"
        return [f"{self._asked}: {tried} were tried and refused {reason}; of the others some may fit"]

    def _held(self, value: int) -> list[float]:
        """Bytes of each device."""
        return [worker.total for worker in self._plans[value].workers_plan]

    def _try(self, value: int) -> None:
        """Plans it, or remembers why not."""
        section = {**getattr(self._settings, self._section), self._name: value}
        settings = replace(self._settings, **cast(Any, {self._section: section}))
        cost = 1
        try:
            planner = Planner(settings, self._options, self._say)
            self._limit, cost = planner.limit, LATE
            self._plans[value] = planner.plan()
        except ConfigurationError as error:
            self._refused[value] = error
            self._patience -= cost
        else:
            self._shortfall.made(self._plans[value])


def _between(low: int, high: int) -> Iterator[int]:
    """The values between these two, in the order in which they are worth trying; some come twice.

    Where accepted values lie a fixed step apart, as multiples of 32, the step divides the distance of any two. So each
    divisor comes first, the largest ones before the others, near the middle and next to ``low``.
    """
    distance = high - low
    for step in _divisors(distance):
        steps = distance // step
        near_middle = next(number for number in range(steps // 2, 0, -1) if gcd(number, steps) == 1)
        yield from (low + near_middle * step, low + step)
    middle = (low + high) // 2
    yield from range(middle, max(middle - JUST_BELOW, low), -1)
    yield from range(low + 1, high)


def _divisors(number: int) -> list[int]:
    """All but the number itself, the largest first."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)} - {number}, reverse=True)
