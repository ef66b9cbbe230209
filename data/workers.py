"""Runs jobs that prepare text in several processes; results come in the jobs' order, with few of them in memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from multiprocessing import get_context
from types import ModuleType
from typing import Any

from ..parent import die_with_parent

RunAll = Callable[..., Iterator[Any]]
"""Yields `function(*job)` of each job, in order."""


@contextmanager
def in_processes(count: int) -> Iterator[RunAll]:
    """Yields what runs jobs in `count` processes, or in this one if `count` is 1.

    They are new interpreters, not forks, because the caller may hold a GPU or threads. They end with this process.
    """
    if count == 1:
        yield starmap
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), die_with_parent, (os.getpid(),))
    try:
        yield partial(_run_all, pool, 2 * count)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_all(
    pool: ProcessPoolExecutor, most: int, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[Any]:
    """Yields the results; fewer than `most` jobs are running or not yet taken."""
    waiting: deque[Future[Any]] = deque()
    for job in jobs:
        with _without_script():
            waiting.append(pool.submit(function, *job))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _without_script() -> Iterator[None]:
    """Hides the running script, which new interpreters import: a script without a `__main__` guard would run again."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
