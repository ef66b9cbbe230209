"""Looks for what a person would try by hand: the smallest that fits, the fastest, the largest model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

from ..config import FREE_FORM, PipelineConfig, Settings
from ..errors import ConfigurationError
from ..pipeline.schedule import KINDS
from .options import Options
from .plan import Plan
from .planner import Planner

REMAT_BY_SPEED = ("never", "except_last", "always")  # the least recomputing first
MOST_MICRO_BATCHES = 1024


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        plan: of it.
        found: the keys that were looked for and their values; empty for a plain plan.
        tried: plans that were made on the way.
    """

    plan: Plan
    found: dict[str, Any] = field(default_factory=dict)
    tried: int = 1

    @property
    def lines(self) -> list[str]:
        """In words, for the terminal."""
        if not self.found:
            return []
        words = " ".join(f"{key}={value}" for key, value in self.found.items())
        return [f"found after {self.tried} plans: {words}"]

    def to_json(self) -> dict[str, Any]:
        return {**self.plan.to_json(), "found": self.found, "tried": self.tried}


def answer(settings: Settings, options: Options) -> Answer:
    """The plan, or what `plan.fit`, `plan.best`, `plan.grow` or `pipeline.M=auto` ask for.

    Raises:
        ConfigurationError: the configuration cannot be planned, or nothing fits.
    """
    if options.grow is not None:
        return grow(settings, options, options.grow)
    planner = Planner(settings, options)
    if options.fit is not None:
        return smallest(planner)
    if options.best:
        return fastest(planner, list(KINDS), REMAT_BY_SPEED)
    if options.find_M:
        return fastest(planner, [settings.pipeline.schedule], (settings.pipeline.remat,), only_M=True)
    return Answer(planner.plan())


def micro_batch_counts(settings: Settings) -> list[int]:
    """The M that searches try: powers of two, as far as the mini-batch has examples."""
    size, replicas = settings.data.get("batch_size"), settings.pipeline.replicas
    most = 4 * settings.pipeline.K
    if isinstance(size, int) and settings.data.get("batch_tokens") is None:
        most = min(MOST_MICRO_BATCHES, size // replicas)
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def cell_counts(planner: Planner) -> list[int]:
    """The K that `smallest` tries."""
    layers, wanted = len(planner.builders), planner.options.candidates
    if wanted is None:
        wanted = sorted({1 << power for power in range(11)} | {3 << power for power in range(10)})
    return [K for K in sorted(wanted) if layers >= K]


class _Trial:
    """Plans one after the other, and remembers what came nearest to the limit."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._nearest: Plan | None = None
        self._refusal: ConfigurationError | None = None
        self.tried = 0

    def plan(self, **values: Any) -> Plan | None:
        """None where the model or the schedule does not go with these values, as BatchNorm with a single number."""
        try:
            made = self._planner.plan(_changed(self._planner.settings.pipeline, **values))
        except ConfigurationError as error:
            self._refusal = error
            return None
        self.tried += 1
        if self._nearest is None or made.memory < self._nearest.memory:
            self._nearest = made
        return made

    def nothing(self) -> ConfigurationError:
        """What to say when nothing fits."""
        if self._nearest is None and self._refusal is not None:
            return self._refusal
        return ConfigurationError(_nothing_fits(self._planner.limit, self._nearest))


def smallest(planner: Planner) -> Answer:
    """The smallest K, for it the smallest M, for both the least recomputing that fit into the limit.

    Raises:
        ConfigurationError: nothing fits; it says what comes nearest.
    """
    trial = _Trial(planner)
    for K in cell_counts(planner):
        # Weights, gradients and optimizer state alone must fit; they depend on neither M nor remat.
        plain = trial.plan(K=K, M=1, remat="always")
        if plain is None or max(worker.model for worker in plain.workers_plan) > planner.limit:
            continue
        for M, remat in product(micro_batch_counts(planner.settings), REMAT_BY_SPEED):
            found = trial.plan(K=K, M=M, remat=remat)
            if found is not None and found.fits:
                return Answer(found, {"pipeline.K": K, "pipeline.M": M, "pipeline.remat": remat}, trial.tried)
    raise trial.nothing()


def fastest(planner: Planner, kinds: Sequence[str], remats: Sequence[str], only_M: bool = False) -> Answer:
    """The most examples a second within the limit, for the configured K; of equals the one with least memory.

    Raises:
        ConfigurationError: nothing fits.
    """
    trial, best = _Trial(planner), None
    for kind, M, remat in product(kinds, micro_batch_counts(planner.settings), remats):
        found = trial.plan(M=M, remat=remat, schedule=kind)
        if found is not None and found.fits and (best is None or _rank(found) < _rank(best)):
            best = found
    if best is None:
        raise trial.nothing()
    keys: dict[str, Any] = {"pipeline.M": best.M}
    if not only_M:
        keys |= {"pipeline.remat": best.remat, "pipeline.schedule": best.schedule}
    return Answer(best, keys, trial.tried)


def _rank(plan: Plan) -> tuple[float, float]:
    return (-plan.examples_per_second, plan.memory)


def _changed(pipeline: PipelineConfig, **values: Any) -> PipelineConfig:
    """With other values; sizes of cells that were typed hold for one K alone."""
    K = values.get("K", pipeline.K)
    workers = pipeline.workers if pipeline.workers == "auto" else min(pipeline.workers, K)
    partition = pipeline.partition if isinstance(pipeline.partition, str) or K == pipeline.K else "min_max"
    return replace(pipeline, **{"workers": workers, "partition": partition, **values})


def _nothing_fits(limit: float, nearest: Plan | None) -> str:
    if nearest is None:
        return f"nothing fits {limit / 1e9:.4g} GB: weights and optimizer alone are larger; more cells, or smaller ones"
    return (
        f"nothing fits {limit / 1e9:.4g} GB: the nearest is {nearest.memory / 1e9:.4g} GB with pipeline.K={nearest.K} "
        f"pipeline.M={nearest.M} pipeline.remat={nearest.remat} pipeline.schedule={nearest.schedule}; use more cells, "
        "a smaller data.batch_size or a smaller model"
    )


def grow(settings: Settings, options: Options, key: str) -> Answer:
    """The largest whole number for ``key`` (such as model.L) whose plan fits, by doubling and then halving the rest.

    Values that the model refuses, as a number of layers that is no multiple of 3, are passed over downwards.

    Raises:
        ConfigurationError: no such key, or not even the smallest value fits.
    """
    section, _, name = key.partition(".")
    start = getattr(settings, section, {}).get(name) if section in FREE_FORM else None
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        raise ConfigurationError(f"plan.grow={key}: use a key with a whole number, such as model.L or data.batch_size")
    attempts = _Attempts(settings, options, section, name)
    low = start
    while low and not attempts.fits(low):
        low //= 2
    if not low:
        raise ConfigurationError(
            f"plan.grow={key}: {_nothing_fits(attempts.limit, attempts.nearest)}"
            if attempts.nearest
            else attempts.refusal
        )
    high = 2 * low
    while attempts.fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempts.fits(middle) else (low, middle)
    found = attempts.plans[low]
    assert found is not None
    return Answer(found, {key: attempts.used[low]}, len(attempts.plans))


class _Attempts:
    """Plans by the value of one key."""

    def __init__(self, settings: Settings, options: Options, section: str, name: str) -> None:
        self._settings, self._options, self._section, self._name = settings, options, section, name
        self.plans: dict[int, Plan | None] = {}
        self.used: dict[int, int] = {}
        self.nearest: Plan | None = None
        self.refusal = ""
        self.limit = 0.0

    def fits(self, value: int) -> bool:
        """Whether the largest allowed value up to this one fits."""
        if value not in self.plans:
            self.plans[value] = self._plan(value)
        plan = self.plans[value]
        if plan is not None and (self.nearest is None or plan.memory < self.nearest.memory):
            self.nearest = plan
        return plan is not None and plan.fits

    def _plan(self, value: int) -> Plan | None:
        for allowed in self._downwards(value):
            section = {**getattr(self._settings, self._section), self._name: allowed}
            try:
                planner = Planner(replace(self._settings, **cast(Any, {self._section: section})), self._options)
                self.limit = planner.limit
                plan = planner.plan()
            except ConfigurationError as error:
                self.refusal = str(error)
                continue
            self.used[value] = allowed
            return plan
        return None

    def _downwards(self, value: int) -> Iterator[int]:
        yield from (value - less for less in range(12) if value - less >= 1)
