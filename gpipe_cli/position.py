"""Describes what a worker is doing, for error reports, in memory that the command can read. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import TypeAlias

Memory: TypeAlias = "bytearray | memoryview | mmap"

FIELDS = ("step", "cell", "layer", "micro_batch", "instruction")
_NUMBER = struct.Struct("q")


class _Number:
    """Keeps a number in the memory of a `Position`, plus one: 0, as in new memory, stands for none."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def __get__(self, position: Position, _: type | None = None) -> int | None:
        number: int = _NUMBER.unpack_from(position.memory, self._offset)[0]
        return number - 1 if number else None

    def __set__(self, position: Position, value: int | None) -> None:
        _NUMBER.pack_into(position.memory, self._offset, 0 if value is None else value + 1)


class _Text:
    """Keeps a text of at most so many bytes; an empty one stands for none."""

    def __init__(self, offset: int, size: int) -> None:
        self._offset, self._form = offset, struct.Struct(f"{size}s")

    def __get__(self, position: Position, _: type | None = None) -> str | None:
        content: bytes = self._form.unpack_from(position.memory, self._offset)[0]
        return content.rstrip(b"\0").decode(errors="replace") or None

    def __set__(self, position: Position, value: str | None) -> None:
        self._form.pack_into(position.memory, self._offset, (value or "").encode())


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

    SIZE = 328

    step, cell, micro_batch = _Number(0), _Number(8), _Number(16)
    instruction, layer = _Text(24, 104), _Text(128, 200)

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = bytearray(self.SIZE) if memory is None else memory

    def enter(self, cell: int | None, micro_batch: int | None, instruction: str | None) -> None:
        """Sets the instruction that runs, and no layer."""
        self.cell, self.micro_batch, self.instruction, self.layer = cell, micro_batch, instruction, None

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
