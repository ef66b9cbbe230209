"""Describes the place of a worker in its step, for error reports, in memory that the command reads. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from mmap import mmap
from typing import TypeAlias

Memory: TypeAlias = "bytearray | memoryview | mmap"

NUMBERS = ("step", "cell", "micro_batch")


@lru_cache(maxsize=4096)  # the same names and numbers come in every step
def _padded(value: int | str | None, size: int) -> bytes:
    content = b"" if value is None else str(value).encode()[:size]
    return content.ljust(size, b"\0")


class _Field:
    """Writes a value to the memory of a `Position`, as a text of at most `size` bytes; None as an empty one."""

    def __init__(self, offset: int, size: int) -> None:
        self.place, self._size = slice(offset, offset + size), size

    def __set__(self, position: Position, value: int | str | None) -> None:
        position.memory[self.place] = _padded(value, self._size)


class Position:
    """Holds the step, cell, micro-batch and operation of a worker, for error reports. Engine and trainer set them.

    Every process that shares the memory sees them at once, so the place of a worker that dies without a report is
    known. Longer texts are cut.

    Args:
        memory: `SIZE` bytes, zero at the beginning; None: memory of its own.

    Attributes:
        step: number of the training step, counted from 1; None outside of steps.
        cell, micro_batch: those of the instruction that runs; None outside of instructions.
        layer: name of the layer whose forward runs; None in a backward.
        instruction: the kind of instruction that runs, or other work such as "reading the next mini-batch".
    """

    SIZE = 364

    step, cell, layer = _Field(0, 20), _Field(20, 20), _Field(40, 200)
    micro_batch, instruction = _Field(240, 20), _Field(260, 104)

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = bytearray(self.SIZE) if memory is None else memory
        self._work: str | None = None  # outside of instructions

    def enter(self, cell: int | None, micro_batch: int | None, instruction: str | None) -> None:
        """Sets the instruction that runs, and no layer."""
        self.cell, self.micro_batch, self.instruction, self.layer = cell, micro_batch, instruction, None

    def leave(self) -> None:
        """Ends an instruction: later errors belong to none."""
        self.enter(None, None, self._work)

    @contextmanager
    def doing(self, work: str) -> Iterator[None]:
        """Names the work of the body, outside of instructions. After an exception the name stays, for the report."""
        before, self._work = self._work, work
        self.instruction = work
        yield
        self.instruction = self._work = before

    def known(self) -> dict[str, int | str]:
        """Returns the fields that are set, by name."""
        fields = {name: field for name, field in vars(Position).items() if isinstance(field, _Field)}
        texts = {name: bytes(self.memory[field.place]).rstrip(b"\0") for name, field in fields.items()}
        found = {name: text.decode(errors="replace") for name, text in texts.items() if text}
        return {name: int(text) if name in NUMBERS else text for name, text in found.items()}
