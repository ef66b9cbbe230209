"""Makes matplotlib's figures, for pictures of images, classes and languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, in inches, that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
