"""Describes the run that is verified: names of layers and micro-batches, as the report shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..layers import Owner
from .record import Key


@dataclass(frozen=True)
class VerifiedRun:
    """Describes the model's layers and the run's division into cells, micro-batches and replicas.

    Attributes:
        names: of the layers.
        cells: the cell of each layer.
        M: micro-batches of a replica.
        seed: of the run.
        statistics: names of the task's sums.
        repeated: the largest relative difference of an output that is computed again.
    """

    names: Sequence[str]
    cells: Sequence[int]
    M: int
    replicas: int
    seed: int
    statistics: Sequence[str]
    repeated: float

    def place(self, layer: int) -> str:
        return f"layer {self.names[layer]} (cell {self.cells[layer]})"

    def micro_batch(self, replica: int, number: int, layer: int) -> str:
        return f"{self.names[layer]}, micro-batch {number}" + (f" of replica {replica}" if replica else "")

    def cells_of(self, layers: Iterable[int]) -> str:
        """Returns the cells of some layers, as "cell 2" or "cells 1, 2"."""
        return listed("cell", {self.cells[layer] for layer in layers})

    def micro_batches(self, places: Iterable[tuple[int, int]]) -> str:
        """Returns (replica, micro-batch) places, as "micro-batches 1, 2 of replica 1"."""
        found = set(places)
        text = listed("micro-batch", {number for _, number in found})
        replicas = {replica for replica, _ in found}
        return f"{text} of {listed('replica', replicas)}" if self.replicas > 1 else text


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


def listed(noun: str, numbers: Iterable[int]) -> str:
    """Returns "cell 2", or "cells 1, 2"."""
    every = sorted(set(numbers))
    plural = ("es" if noun.endswith("ch") else "s") if len(every) > 1 else ""
    return f"{noun}{plural} {', '.join(map(str, every))}"
