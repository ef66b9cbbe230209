"""Describes the place of a worker in its step, for error reports, in memory that the command reads. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Generic, TypeAlias, TypeVar

Memory: TypeAlias = "bytearray | memoryview | mmap"
T = TypeVar("T")

FIELDS = ("step", "cell", "layer", "micro_batch", "instruction")


class _Field(Generic[T]):
    """Keeps a value in the memory of a `Position`, as a text of at most so many bytes; an empty one stands for None."""

    def __init__(self, offset: int, size: int, kind: Callable[[str], T]) -> None:
        self._place, self._size, self._kind = slice(offset, offset + size), size, kind

    def __get__(self, position: Position, _: type | None = None) -> T | None:
        content = bytes(position.memory[self._place]).rstrip(b"\0")
        return self._kind(content.decode(errors="replace")) if content else None

    def __set__(self, position: Position, value: T | None) -> None:
        content = b"" if value is None else str(value).encode()[: self._size]
        position.memory[self._place] = content.ljust(self._size, b"\0")


class Position:
    """Holds the cell, micro-batch and operation of a worker; the engine and the trainer keep it up to date.

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

    SIZE = 364

    step, cell, micro_batch = _Field(0, 20, int), _Field(20, 20, int), _Field(40, 20, int)
    instruction, layer = _Field(60, 104, str), _Field(164, 200, str)

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
