"""Where a step goes: the paper's Table 4, from what the bubble meter has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..schedule.forecast import Durations, Forecast
from ..schedule.instruction import Op

if TYPE_CHECKING:
    from pathlib import Path

RECOMPUTATION = (Op.RECOMPUTE,)


@dataclass(frozen=True)
class Breakdown:
    """Shares of the workers' time in a step: W workers times the seconds from one step's begin to its update's end.

    The names are Table 4's; the paper does not define them, so these definitions are ours. They add up to 1.

    Attributes:
        computation: forward and backward.
        recomputation: forward computed again in backward (section 2.3).
        bubble: what the schedule itself leaves idle: its simulation with the same work spread evenly over the workers
            and with messages that take no time. Early recompute is in it, so it can be less than (K-1)/(M+K-1).
        load_imbalance: what the simulation with the cells' own measured times leaves idle beyond that.
        setup: all other time: sending and messages under way, reading data, the exchange of reports and plans, sums
            over replicas, and unsteady times.
        weight_update: clipping, optimizer, moving averages; the mean over the workers.
    """

    computation: float
    recomputation: float
    bubble: float
    load_imbalance: float
    setup: float
    weight_update: float

    def shares(self) -> dict[str, float]:
        """By name, in Table 4's order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """One line: "computation 65.6 %, recomputation 22.5 %, …"."""
        return ", ".join(f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in self.shares().items())


def break_down(forecast: Forecast, durations: Durations, update_seconds: float, step_seconds: float) -> Breakdown:
    """The shares of a step (paper, Table 4).

    Args:
        forecast: of the lists that ran.
        durations: measured seconds of one instruction, by kind and cell.
        update_seconds: of the weight update, the mean over the workers.
        step_seconds: of the whole step, update and data and all.

    Raises:
        ValueError: ``step_seconds`` is not positive.
    """
    if step_seconds <= 0:
        raise ValueError(f"step_seconds={step_seconds}: a step takes time")
    workers = len(forecast.lists)
    whole = workers * step_seconds
    again = sum(n * durations[key] for key, n in forecast.counts.items() if key[0] in RECOMPUTATION)
    busy, update = forecast.busy(durations), workers * update_seconds
    # Measured times waver, the simulation's are means: no part may be more than there is left to divide.
    left = max(0.0, whole - busy - update)
    bubble = min(left, forecast.idle(forecast.even_durations(durations)))
    imbalance = min(left - bubble, max(0.0, forecast.idle(durations) - bubble))
    parts = [busy - again, again, bubble, imbalance, left - bubble - imbalance, update]
    total = sum(parts)  # `whole`, but where computation and update seem to fill more than the step
    return Breakdown(*(part / total for part in parts))


def mean_breakdown(
    forecast: Forecast, cells: Sequence[Mapping[str, float]], updates: Sequence[float], step_seconds: float
) -> Breakdown:
    """`break_down` from a report's figures.

    Args:
        cells: for each cell the seconds that a step spent in each kind of computation.
        updates: seconds of every worker's weight update.
    """
    return break_down(forecast, forecast.mean_durations(cells), sum(updates) / len(updates), step_seconds)


# As in `schedule/picture.py`: blue forward, pale recompute, and warm colours for what is lost.
_COLOURS = ("#2f6db3", "#a9cdee", "#d9dce1", "#b9412f", "#8a8f99", "#4d9a6a")


def draw_breakdown(columns: Mapping[str, Mapping[str, float]], path: Path, title: str = "") -> None:
    """One horizontal bar per column, such as {"measured": …, "paper": …}; the file's suffix says the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.55 * len(columns)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(next(iter(columns.values())))
    for row, shares in enumerate(columns.values()):
        left = 0.0
        for name, colour in zip(names, _COLOURS, strict=True):
            width = 100 * shares[name]
            label = name.replace("_", " ") if row == 0 else None
            axes.barh(row, width, left=left, color=colour, edgecolor="white", label=label)
            if width >= 3.5:
                ink = "white" if colour in ("#2f6db3", "#b9412f", "#8a8f99", "#4d9a6a") else "#2b2f36"
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=9, color=ink)
            left += width
    axes.set_yticks(range(len(columns)), list(columns))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the workers' time")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
