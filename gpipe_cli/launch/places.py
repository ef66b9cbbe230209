"""Shares each worker's place with the command, in memory: it is exact even when the worker dies without a word."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

from gpipe_cli.position import Position


class Places:
    """Holds the command's view of its workers' places.

    Args:
        workers: their number.

    Attributes:
        descriptor: of the memory, for the workers; to be closed when they have it.
    """

    def __init__(self, workers: int) -> None:
        self.descriptor = unnamed_memory(workers * Position.SIZE)
        self._memory = mmap.mmap(self.descriptor, workers * Position.SIZE)
        self._places = [_place(self._memory, rank) for rank in range(workers)]
        self._seen = bytes(self._memory)

    def of(self, rank: int) -> dict[str, Any]:
        """Returns what a worker is doing, or was doing when it died; empty where nothing is known."""
        return self._places[rank].known() if 0 <= rank < len(self._places) else {}

    def have_changed(self) -> bool:
        """Returns whether a worker has got on since the last call."""
        before, self._seen = self._seen, bytes(self._memory)
        return before != self._seen


def open_place(descriptor: int, rank: int) -> Position:
    """Returns the place of worker ``rank``, in the memory that the command reads; closes the descriptor."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return _place(memory, rank)


def _place(memory: mmap.mmap, rank: int) -> Position:
    return Position(memoryview(memory)[rank * Position.SIZE : (rank + 1) * Position.SIZE])


def unnamed_memory(size: int) -> int:
    """Returns a descriptor that children can inherit; of a file without a name where the system has no such memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gpipe-places")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
