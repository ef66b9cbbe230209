"""Remembers the plans of a search and words the error for the case that none of them fits."""

from __future__ import annotations

from ...config import Settings
from ...errors import ConfigurationError
from ..plan import Plan


class Attempts:
    """Counts the plans of one search and remembers the one nearest to the limit.

    Args:
        settings: the configuration that the search starts from.

    Attributes:
        count: number of plans made.
        nearest: the plan with the least memory; None before the first.
    """

    def __init__(self, settings: Settings) -> None:
        self._batch_key = "data.batch_size" if settings.data.get("batch_tokens") is None else "data.batch_tokens"
        self._refusal: ConfigurationError | None = None
        self._most_cells = self.count = 0
        self.nearest: Plan | None = None

    def add(self, plan: Plan) -> None:
        self.count += 1
        self._most_cells = max(self._most_cells, plan.K)
        if self.nearest is None or plan.memory < self.nearest.memory:
            self.nearest = plan

    def refused(self, error: ConfigurationError) -> None:
        self._refusal = error

    def error(self, prefix: str = "") -> ConfigurationError:
        """Returns the error to raise when no plan fits; its text begins with ``prefix``."""
        plan = self.nearest
        if plan is None:
            return self._refusal or ConfigurationError("there is nothing to try")
        # With fewer workers than cells, more cells only mean more cells on each device.
        more_cells = self._most_cells < sum(cell.layers for cell in plan.cells) and plan.workers == plan.K
        ways, cause = ["more cells"] if more_cells else [], ""
        if plan.model_memory > plan.limit:
            cause = f", and weights, gradients and optimizer state alone are {plan.model_memory / 1e9:.4g} GB"
            ways.append("an optimizer with less state")
        else:
            ways.append(f"a smaller {self._batch_key}")
        return ConfigurationError(
            f"{prefix}nothing fits {plan.limit / 1e9:.4g} GB: the nearest is {plan.memory / 1e9:.4g} GB with "
            f"pipeline.K={plan.K} pipeline.M={plan.M} pipeline.remat={plan.remat} pipeline.schedule={plan.schedule}"
            f"{cause}; use {', '.join(ways)} or a smaller model"
        )
