"""Keeps other cores busy while layers are timed, as the other workers of a run do.

Workers share caches, memory and, as two threads of one physical core, even its units: together they are slower than
each alone. The load is NumPy's, because its processes start in a tenth of the time that torch takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...cpu import keep_freed_memory

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def background_load(processes: int, threads: int) -> Iterator[None]:
    """Runs processes that multiply matrices and move memory for as long as the body runs.

    Args:
        processes: may be 0.
        threads: of each.

    Raises:
        RuntimeError: a process cannot be started.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    environment = os.environ | dict.fromkeys(_THREADS, str(threads))
    with ExitStack() as stack:
        started = []
        for _ in range(processes):  # in a session of their own: Ctrl-C is for the command to handle
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            if process.stdout is None or not process.stdout.read(1):
                raise RuntimeError(f"a process that keeps a core busy ended with exit code {process.wait()}")
        yield


def main(parent: int) -> None:
    """Computes until the process that started this one has ended."""
    import numpy as np

    keep_freed_memory()
    matrix, vector = np.full((256, 256), 1e-3, np.float32), np.zeros(1 << 21, np.float32)
    os.write(1, b".")
    while os.getppid() == parent:
        for _ in range(20):
            np.matmul(matrix, matrix)
        vector += 1.0
        np.ones(1 << 20, np.float32)  # new memory, as for the output of a layer


if __name__ == "__main__":
    main(int(sys.argv[1]))
