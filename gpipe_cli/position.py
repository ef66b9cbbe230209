"""Describes what a worker is doing, for error reports, in memory that the command can read. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import TypeAlias

Memory: TypeAlias = "bytearray | memoryview | mmap"

FIELDS = ("step", "cell", "layer", "micro_batch", "instruction")
_NUMBER = struct.Struct("q")  # plus one: 0, as in new memory, stands for none
_PLACE = struct.Struct("qq100s200s")  # cell, micro-batch, instruction, layer: an empty text stands for none
_LAYER = struct.Struct("200s")
_LAYER_AT = _NUMBER.size + _PLACE.size - _LAYER.size


class Position:
    """Holds what a worker is doing; the engine and the trainer keep it up to date.

    What is written is there at once for every process that shares the memory, so the place of a worker that dies
    without a word is known. Longer texts are cut.

    Args:
        memory: `SIZE` bytes, zero at the beginning; None: memory of its own.

    Attributes:
        step: number of the training step, counted from 1; None outside of steps.
        cell, micro_batch: of the instruction that runs; None outside of instructions.
        layer: name of the layer whose forward runs; None in a backward.
        instruction: the kind of instruction that runs, or other work such as "reading the next mini-batch".
    """

    SIZE = _NUMBER.size + _PLACE.size

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = bytearray(self.SIZE) if memory is None else memory

    def enter(self, cell: int | None, micro_batch: int | None, instruction: str | None) -> None:
        """Sets the instruction that runs, and no layer."""
        numbers = 0 if cell is None else cell + 1, 0 if micro_batch is None else micro_batch + 1
        _PLACE.pack_into(self._memory, _NUMBER.size, *numbers, (instruction or "").encode(), b"")

    @contextmanager
    def doing(self, work: str) -> Iterator[None]:
        """Names the work of the body, outside of instructions; after an exception the name stays, for the report."""
        before, self.instruction = self.instruction, work
        yield
        self.instruction = before

    def known(self) -> dict[str, int | str]:
        """Returns the fields that are set, by name."""
        found = {name: getattr(self, name) for name in FIELDS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def step(self) -> int | None:
        number: int = _NUMBER.unpack_from(self._memory)[0]
        return number - 1 if number else None

    @step.setter
    def step(self, value: int | None) -> None:
        _NUMBER.pack_into(self._memory, 0, 0 if value is None else value + 1)

    @property
    def cell(self) -> int | None:
        number: int = _PLACE.unpack_from(self._memory, _NUMBER.size)[0]
        return number - 1 if number else None

    @property
    def micro_batch(self) -> int | None:
        number: int = _PLACE.unpack_from(self._memory, _NUMBER.size)[1]
        return number - 1 if number else None

    @property
    def instruction(self) -> str | None:
        return _text(_PLACE.unpack_from(self._memory, _NUMBER.size)[2])

    @instruction.setter
    def instruction(self, value: str | None) -> None:
        self.enter(self.cell, self.micro_batch, value)

    @property
    def layer(self) -> str | None:
        return _text(_PLACE.unpack_from(self._memory, _NUMBER.size)[3])

    @layer.setter
    def layer(self, value: str | None) -> None:
        _LAYER.pack_into(self._memory, _LAYER_AT, (value or "").encode())


def _text(content: bytes) -> str | None:
    return content.rstrip(b"\0").decode(errors="replace") or None
