"""Looks for what a person would try by hand: the smallest that fits, the fastest, the largest model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ...config import PipelineConfig, Settings
from ...errors import ConfigurationError
from ...schedule.schedule import KINDS
from ...typed_section import shown
from ..answer import Answer
from ..measure.example import example_micro_batch
from ..options import Options
from ..plan import Plan
from ..planner import Planner, Say, say_nothing
from .growth import grow
from .shortfall import Shortfall

REMAT_BY_SPEED = ("never", "except_last", "always")  # the least recomputing first
MOST_MICRO_BATCHES = 1024
_AT_ONCE = 16  # numbers of cells tried between one that fits and one that does not, before those between them


def answer(settings: Settings, options: Options, say: Say = say_nothing) -> Answer:
    """The plan, or what `plan.fit`, `plan.best`, `plan.grow` or `pipeline.M=auto` ask for.

    Args:
        say: is told what takes long, before it begins.

    Raises:
        ConfigurationError: the configuration cannot be planned, or nothing fits.
    """
    if options.grow is not None:
        return grow(settings, options, options.grow, say)
    planner = Planner(settings, options, say)
    if options.fit is not None:
        return smallest(planner)
    if options.best:
        return fastest(planner, list(KINDS), REMAT_BY_SPEED)
    if options.find_M:
        return fastest(planner, [settings.pipeline.schedule], (settings.pipeline.remat,), only_M=True)
    return Answer(planner.plan())


def micro_batch_counts(settings: Settings, longest: bool = False) -> list[int]:
    """The M that searches try: powers of two, as far as a typical mini-batch has examples.

    Args:
        longest: see `example_micro_batch`; of a mini-batch counted in tokens, longer ones are fewer.
    """
    replicas = settings.pipeline.replicas
    _, examples = example_micro_batch(settings.data, replicas, longest)
    most = min(MOST_MICRO_BATCHES, examples // replicas)
    return [1 << power for power in range(most.bit_length())]


def cell_counts(planner: Planner) -> list[int]:
    """The K that `smallest` tries first: `plan.candidates`, or 2^n, 3·2^n and the number of layers.

    Raises:
        ConfigurationError: each of `plan.candidates` is more than the model has layers.
    """
    layers, wanted = len(planner.builders), planner.options.candidates
    if wanted is None:
        wanted = [layers, *(1 << power for power in range(11)), *(3 << power for power in range(10))]
    counts = sorted({K for K in wanted if layers >= K})
    if not counts:
        raise ConfigurationError(
            f"plan.candidates={shown(wanted)}: the model has {layers} layers and every cell needs one, use numbers up "
            f"to {layers}"
        )
    return counts


class _Trial:
    """Plans one after the other.

    Attributes:
        micro_batch_counts: the M to try.
        tried: plans that were made.
        lightest: the plan whose fullest device holds least of weights, gradients and optimizer state.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._shortfall = planner, Shortfall(planner.settings)
        self.micro_batch_counts = micro_batch_counts(planner.settings, planner.options.longest)
        self.lightest: Plan | None = None
        self.tried = 0

    @property
    def limit(self) -> float:
        return self._planner.limit

    def plan(self, **values: Any) -> Plan | None:
        """None where the model or the schedule does not go with these values, as BatchNorm with a single number."""
        try:
            made = self._planner.plan(_changed(self._planner.settings.pipeline, **values))
        except ConfigurationError as error:
            self._shortfall.refused(error)
            return None
        self.tried += 1
        self._shortfall.made(made)
        if self.lightest is None or _model_bytes(made) < _model_bytes(self.lightest):
            self.lightest = made
        return made

    def any_with_cells(self, K: int) -> Answer | None:
        """The smallest M, for it the least recomputing that fit with so many cells."""
        for M, remat in product(self.micro_batch_counts, REMAT_BY_SPEED):
            found = self.plan(K=K, M=M, remat=remat)
            if found is not None and found.fits:
                return Answer(found, {"pipeline.K": K, "pipeline.M": M, "pipeline.remat": remat}, self.tried)
        return None

    def with_cells(self, K: int) -> Answer | None:
        """Likewise, without trying much where weights, gradients and optimizer state alone do not fit.

        They depend on neither M nor remat.
        """
        plain = self.plan(K=K, M=1, remat="always")
        return None if plain is None or _model_bytes(plain) > self.limit else self.any_with_cells(K)

    def nothing(self) -> ConfigurationError:
        """What to say when nothing fits."""
        return self._shortfall.error(self.limit)


def _model_bytes(plan: Plan) -> float:
    """Weights, gradients and optimizer state on the device that holds most of them."""
    return max(worker.model for worker in plan.workers_plan)


def smallest(planner: Planner) -> Answer:
    """The smallest K, for it the smallest M, for both the least recomputing that fit into the limit.

    Raises:
        ConfigurationError: nothing fits; it says what comes nearest.
    """
    trial, too_few = _Trial(planner), 0
    for K in cell_counts(planner):
        found = trial.with_cells(K)
        if found is not None:
            found = found if planner.options.candidates else _fewer_cells(trial, too_few, found)
            return replace(found, tried=trial.tried)
        too_few = K
    if trial.lightest is not None and _model_bytes(trial.lightest) > trial.limit:
        trial.any_with_cells(trial.lightest.K)  # for what comes nearest: with M=1 alone it would not be told
    raise trial.nothing()


def _fewer_cells(trial: _Trial, too_few: int, found: Answer) -> Answer:
    """The fewest cells that fit of those between ``too_few``, which do not, and those of ``found``."""
    while (between := found.plan.K - too_few - 1) > 0:
        step = -(-between // _AT_ONCE)
        for K in range(too_few + step, found.plan.K, step):
            smaller = trial.with_cells(K)
            if smaller is not None:
                found = smaller
                break
            too_few = K
    return found


def fastest(planner: Planner, kinds: Sequence[str], remats: Sequence[str], only_M: bool = False) -> Answer:
    """The most examples a second within the limit, for the configured K; of equals the one with least memory.

    Raises:
        ConfigurationError: nothing fits.
    """
    trial, best = _Trial(planner), None
    for kind, M, remat in product(kinds, trial.micro_batch_counts, remats):
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
