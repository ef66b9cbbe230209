"""Describes the run that is verified: names and places, as the report shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..layers import Owner
from .record import Key


@dataclass(frozen=True)
class VerifiedRun:
    """Describes the model's layers and the run's division into cells, micro-batches and replicas.

    Attributes:
        names: of the layers.
        cells: the cell of each layer.
        statistics: names of the task's sums.
        repeated: the largest relative difference of an output that is computed again.
    """

    names: Sequence[str]
    cells: Sequence[int]
    statistics: Sequence[str]
    repeated: float

    def place(self, layer: int) -> str:
        return f"layer {self.names[layer]} (cell {self.cells[layer]})"

    def micro_batch(self, replica: int, number: int, layer: int) -> str:
        return f"{self.names[layer]}, micro-batch {number}" + (f" of replica {replica}" if replica else "")


def owners_of(ties: Sequence[Mapping[str, Owner]], names: Sequence[str]) -> dict[Key, Key]:
    """Returns the owner of every other use of a tied parameter.

    Args:
        ties: of every layer, as in `Cut`.
        names: of the layers.
    """
    return {
        (index, f"{names[index]}.{own}"): (names.index(owner.layer), str(owner))
        for index, tied in enumerate(ties)
        for own, owner in tied.items()
    }
