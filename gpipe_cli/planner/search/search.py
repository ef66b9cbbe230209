"""Finds the pipeline that a person would look for by hand: the smallest that fits, or the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ...config import PipelineConfig, Settings
from ...errors import ConfigurationError
from ...factory.example import example_micro_batch
from ...schedule.orders import KINDS
from ..options import Options
from ..plan import Plan
from ..planner import Planner
from .attempts import Attempts
from .growth import grow

REMAT_BY_SPEED = ("never", "except_last", "always")  # the least recomputing first
MOST_MICRO_BATCHES = 1024
_AT_ONCE = 16  # values of K tried between one that does not fit and one that does, before those between them


def find_plan(settings: Settings, options: Options) -> Plan:
    """Returns the plan of a configuration, after the search of `plan.fit`, `plan.best` or `plan.grow`, if any.

    Raises:
        ConfigurationError: the configuration cannot be planned, or nothing fits.
    """
    if options.grow is not None:
        return grow(settings, options, options.grow)
    planner = Planner(settings, options)
    if options.fit is not None:
        return smallest(planner)
    if options.best:
        return fastest(planner)
    return planner.plan()


def micro_batch_counts(settings: Settings, longest: bool = False) -> list[int]:
    """Returns the values of M that searches try: powers of two up to the examples of a typical mini-batch.

    Args:
        longest: see `example_micro_batch`; a mini-batch counted in tokens holds fewer long examples.
    """
    replicas = settings.pipeline.replicas
    _, examples = example_micro_batch(settings, replicas, longest)
    most = min(MOST_MICRO_BATCHES, examples // replicas)
    return [1 << power for power in range(most.bit_length())]


def cell_counts(planner: Planner) -> list[int]:
    """Returns the values of K that `smallest` tries first: 2^n, 3·2^n and the number of layers."""
    layers = len(planner.builders)
    wanted = {layers, *(1 << power for power in range(11)), *(3 << power for power in range(10))}
    return sorted(K for K in wanted if layers >= K)


class _PipelineSearch:
    """Plans one model with different pipelines."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self.attempts = planner, Attempts()
        self.micro_batch_counts = micro_batch_counts(planner.settings, planner.options.longest)

    def plan(self, **values: Any) -> Plan | None:
        """Makes a plan; returns None where model or schedule refuse these values, as BatchNorm does a single number."""
        try:
            plan = self._planner.plan(_changed(self._planner.settings.pipeline, **values))
        except ConfigurationError as error:
            self.attempts.refused(error)
            return None
        self.attempts.add(plan)
        return plan

    def any_with_cells(self, K: int) -> Plan | None:
        """Returns the plan with the smallest M, and for it the least recomputing, that fits with K cells."""
        plans = (self.plan(K=K, M=M, remat=remat) for M, remat in product(self.micro_batch_counts, REMAT_BY_SPEED))
        return next((plan for plan in plans if plan is not None and plan.fits), None)

    def with_cells(self, K: int) -> Plan | None:
        """Returns the same, with a single plan tried where weights, gradients and optimizer state do not fit.

        These depend on neither M nor remat.
        """
        plan = self.plan(K=K, M=1, remat="always")
        return None if plan is None or plan.model_memory > plan.limit else self.any_with_cells(K)

    def found(self, plan: Plan, *keys: str) -> Plan:
        """Returns the plan, marked as the one found by a search for these keys of `pipeline`."""
        values = {f"pipeline.{key}": getattr(plan, key) for key in keys}
        return replace(plan, found=values, tried=self.attempts.count)


def smallest(planner: Planner) -> Plan:
    """Returns the plan with the smallest K, for it the smallest M, for both the least recomputing that fits.

    Raises:
        ConfigurationError: nothing fits; the message describes the nearest plan.
    """
    search, too_few = _PipelineSearch(planner), 0
    for K in cell_counts(planner):
        plan = search.with_cells(K)
        if plan is not None:
            return search.found(_fewer_cells(search, too_few, plan), "K", "M", "remat")
        too_few = K
    nearest = search.attempts.nearest
    if nearest is not None and nearest.model_memory > nearest.limit:
        search.any_with_cells(nearest.K)  # only M=1 was tried, and the message is to name the nearest plan
    raise search.attempts.error()


def _fewer_cells(search: _PipelineSearch, too_few: int, plan: Plan) -> Plan:
    """Returns the plan with the fewest cells between ``too_few``, which do not fit, and those of ``plan``, which do."""
    while (between := plan.K - too_few - 1) > 0:
        step = -(-between // _AT_ONCE)
        for K in range(too_few + step, plan.K, step):
            smaller = search.with_cells(K)
            if smaller is not None:
                plan = smaller
                break
            too_few = K
    return plan


def fastest(planner: Planner) -> Plan:
    """Returns the plan with the most examples a second that fits, for the configured K; of equals the smallest.

    Raises:
        ConfigurationError: nothing fits.
    """
    search = _PipelineSearch(planner)
    plans = [
        search.plan(M=M, remat=remat, schedule=kind)
        for kind, M, remat in product(KINDS, search.micro_batch_counts, REMAT_BY_SPEED)
    ]
    fitting = [plan for plan in plans if plan is not None and plan.fits]
    if not fitting:
        raise search.attempts.error()
    best = min(fitting, key=lambda plan: (-plan.examples_per_second, plan.memory))
    return search.found(best, "M", "remat", "schedule")


def _changed(pipeline: PipelineConfig, **values: Any) -> PipelineConfig:
    """Returns the section with other values; with another K, typed sizes of cells no longer hold."""
    K = values.get("K", pipeline.K)
    workers = pipeline.workers if pipeline.workers == "auto" else min(pipeline.workers, K)
    partition = pipeline.partition if isinstance(pipeline.partition, str) or K == pipeline.K else "auto"
    return replace(pipeline, **{"workers": workers, "partition": partition, **values})
