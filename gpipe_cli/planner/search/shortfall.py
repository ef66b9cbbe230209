"""What to say when nothing fits: what comes nearest, and what would bring it nearer."""

from __future__ import annotations

from ...config import Settings
from ...errors import ConfigurationError
from ..plan import Plan


class Shortfall:
    """Remembers of all plans that are tried which came nearest to the limit, and why others could not be made.

    Args:
        settings: what the plans are of.
    """

    def __init__(self, settings: Settings) -> None:
        counted = "batch_size" if settings.data.get("batch_tokens") is None else "batch_tokens"
        self._smaller_batch = f"a smaller data.{counted}"
        self._nearest: Plan | None = None
        self._refusal: ConfigurationError | None = None
        self._most_cells = 0

    def made(self, plan: Plan) -> None:
        self._most_cells = max(self._most_cells, plan.K)
        if self._nearest is None or plan.memory < self._nearest.memory:
            self._nearest = plan

    def refused(self, error: ConfigurationError) -> None:
        self._refusal = error

    def error(self, limit: float, asked: str = "") -> ConfigurationError:
        """What to raise when none of them fits.

        Args:
            limit: bytes that a device may hold.
            asked: what stands before the sentence.
        """
        if self._nearest is None:
            return self._refusal or ConfigurationError("there is nothing to try")
        return ConfigurationError(asked + _nothing_fits(self._nearest, limit, self._most_cells, self._smaller_batch))


def _nothing_fits(nearest: Plan, limit: float, most_cells: int, smaller_batch: str) -> str:
    """The sentence that refuses.

    Args:
        nearest: of the plans that were tried, the one with least memory.
        limit: bytes that a device may hold.
        most_cells: the largest number of cells that was tried.
        smaller_batch: what it takes for activations to be less.
    """
    layers = sum(cell.layers for cell in nearest.cells)
    # With fewer workers than cells, more cells are more on each device.
    ways = ["more cells"] if most_cells < layers and nearest.workers == nearest.K else []
    model = max(worker.model for worker in nearest.workers_plan)
    cause = ""
    if model > limit:
        cause = f", and weights, gradients and optimizer state alone are {model / 1e9:.4g} GB"
        ways += ["an optimizer with less state"]
    else:
        ways += [smaller_batch]
    return (
        f"nothing fits {limit / 1e9:.4g} GB: the nearest is {nearest.memory / 1e9:.4g} GB with pipeline.K={nearest.K} "
        f"pipeline.M={nearest.M} pipeline.remat={nearest.remat} pipeline.schedule={nearest.schedule}{cause}; "
        f"use {', '.join(ways)} or a smaller model"
    )
