"""What to say when nothing fits: what comes nearest, and what would bring it nearer."""

from __future__ import annotations

from .plan import Plan


def nothing_fits(nearest: Plan, limit: float, most_cells: int) -> str:
    """The sentence that refuses.

    Args:
        nearest: of the plans that were tried, the one with least memory.
        limit: bytes that a device may hold.
        most_cells: the largest number of cells that was tried.
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
        ways += ["a smaller data.batch_size"]
    return (
        f"nothing fits {limit / 1e9:.4g} GB: the nearest is {nearest.memory / 1e9:.4g} GB with pipeline.K={nearest.K} "
        f"pipeline.M={nearest.M} pipeline.remat={nearest.remat} pipeline.schedule={nearest.schedule}{cause}; "
        f"use {', '.join(ways)} or a smaller model"
    )
