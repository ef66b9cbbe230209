"""A finished table: its rows, what has to be said with it, and its curves for the plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str], None]  # tells the person what is being measured


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Attributes:
        panel: title of the part of the picture that it stands in.
        role: "paper", "ours", "ideal", "limit" or "peer": how it is drawn.
        points: (x, y).
    """

    panel: str
    label: str
    role: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """What one command found.

    Attributes:
        name: of the files, as "table2".
        title: one line.
        columns, rows: as they are printed; None prints as a dash.
        notes: the protocol and what is remarkable, one sentence each.
        facts: for programs: everything measured, in full precision.
        curves: for the plot.
        bars: in their place, shares of a step: column to name to share.
        axes: names of the curves' axes.
        logarithmic: both of them.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str]
    facts: dict[str, Any]
    curves: Sequence[Curve] = ()
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    axes: tuple[str, str] = field(default=("cells K", "normalised throughput"))
    logarithmic: bool = False


def two_digits(value: float | None) -> str | None:
    """A throughput, as the paper prints them."""
    return None if value is None else f"{value:.2f}"
