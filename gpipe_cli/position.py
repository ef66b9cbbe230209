"""Describes what a worker is doing, for error reports. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """Holds what a worker is doing; the engine and the trainer keep it up to date, another thread may read it.

    Attributes:
        step: number of the training step, counted from 1.
        cell, micro_batch: of the instruction that runs; None outside of instructions.
        layer: name of the layer.
        instruction: the kind of instruction that runs, or other work such as "reading the next mini-batch".
    """

    step: int | None = None
    cell: int | None = None
    layer: str | None = None
    micro_batch: int | None = None
    instruction: str | None = None

    def known(self) -> dict[str, int | str]:
        """Returns the fields that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}
