"""Other workers of this machine, as far as a timed layer feels them: they share its memory, its caches, its units.

Two workers on two cores that share a physical one are together faster than one, but not twice as fast.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

from ...cpu import keep_freed_memory

_WORK, _REST, _DONE = b"w", b"r", b"."


class Neighbours:
    """Processes that compute and move memory when told to.

    They start when they are first needed (torch takes a second or two) and rest between two times; they end with this
    object, and with this process, however it ends.

    Args:
        count: of processes; may be 0.
        threads: of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        self._count, self._threads = count, threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _dismiss, self._processes)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """They work while the body runs."""
        while len(self._processes) < self._count:
            command = [sys.executable, "-m", __name__, str(self._threads)]
            self._processes.append(
                subprocess.Popen(  # in a session of their own: Ctrl-C is ours to answer
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
                )
            )
        self._tell(_WORK)
        try:
            yield
        finally:
            self._tell(_REST)

    def dismiss(self) -> None:
        """End them now."""
        self._end()

    def _tell(self, what: bytes) -> None:
        """All of them; returns when they have heard it."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has died: so says its missing answer
                cast(IO[bytes], process.stdin).write(what)
        for process in self._processes:
            if cast(IO[bytes], process.stdout).read(1) != _DONE:
                raise RuntimeError(f"a process that keeps a core busy ended with exit code {process.wait()}")


def _dismiss(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            cast(IO[bytes], pipe).close()
    processes.clear()


def main(threads: int) -> None:
    """Work and rest as told on standard input, until its end."""
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    matrix, vector = torch.full((256, 256), 1e-3), torch.zeros(1 << 21)
    told = _REST
    while told:
        if told == _REST or select.select([0], [], [], 0)[0]:
            if told := os.read(0, 1):
                os.write(1, _DONE)
            continue
        for _ in range(20):
            torch.mm(matrix, matrix)
        vector.add_(1.0)
        torch.ones(1 << 20)  # new memory, as every layer's output


if __name__ == "__main__":
    main(int(sys.argv[1]))
