"""Other workers of this machine, as far as a timed layer feels them: they share its memory, its caches, its units.

Two workers on two cores that share a physical one are together faster than one, but not twice as fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_neighbours(count: int, threads: int) -> Iterator[None]:
    """While the body runs, ``count`` processes compute and move memory, with so many threads each."""
    command = [sys.executable, "-m", __name__, str(threads)]
    neighbours = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()  # it has begun
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()


def main(threads: int) -> None:
    """Works until killed, or until nobody waits any more."""
    import torch

    torch.set_num_threads(threads)
    parent = os.getppid()
    matrix, vector = torch.full((256, 256), 1e-3), torch.zeros(1 << 21)
    print("busy", flush=True)
    while os.getppid() == parent:
        for _ in range(20):
            torch.mm(matrix, matrix)
        vector.add_(1.0)
        torch.ones(1 << 20)  # new memory, as every layer's output


if __name__ == "__main__":
    main(int(sys.argv[1]))
