"""Remembers the plans of a search and words the error for the case that none of them fits."""

from __future__ import annotations

from ...errors import ConfigurationError
from ..plan import Plan


class Attempts:
    """Counts the plans of one search and remembers the one nearest to the limit.

    Attributes:
        count: number of plans made.
        nearest: the plan with the least memory; None before the first.
    """

    def __init__(self) -> None:
        self._refusal: ConfigurationError | None = None
        self.count = 0
        self.nearest: Plan | None = None

    def add(self, plan: Plan) -> None:
        self.count += 1
        if self.nearest is None or plan.memory < self.nearest.memory:
            self.nearest = plan

    def refused(self, error: ConfigurationError) -> None:
        self._refusal = error

    def error(self, prefix: str = "") -> ConfigurationError:
        """Returns the error to raise when no plan fits; its text begins with ``prefix``."""
        plan = self.nearest
        if plan is None:
            return self._refusal or ConfigurationError("there is nothing to try")
        way, cause = "smaller mini-batches", ""
        if plan.model_memory > plan.limit:
            way = "an optimizer with less state"
            cause = f", and weights, gradients and optimizer state alone are {plan.model_memory / 1e9:.4g} GB"
        return ConfigurationError(
            f"{prefix}nothing fits {plan.limit / 1e9:.4g} GB: the nearest is {plan.memory / 1e9:.4g} GB with "
            f"pipeline.K={plan.K} pipeline.M={plan.M} pipeline.remat={plan.remat} pipeline.schedule={plan.schedule}"
            f"{cause}; use more workers, {way} or a smaller model"
        )
