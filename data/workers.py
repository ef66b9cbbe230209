"""Runs jobs that prepare text in several processes; results come in the jobs' order, with few of them in memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import starmap
from multiprocessing import get_context
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from ..parent import die_with_parent

Result = TypeVar("Result")


class Workers:
    """Runs a function in `count` processes, or in this one if `count` is 1.

    They are new interpreters, not forks, because the caller may hold a GPU or threads. They end with this process.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[..., Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
        """Yields `function(*job)` of each job, in order; at most two jobs per process are running or not yet taken."""
        if self.count == 1:
            yield from starmap(function, jobs)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.count, get_context("spawn"), die_with_parent, (os.getpid(),))
        waiting: deque[Future[Result]] = deque()
        for job in jobs:
            with _without_script():
                waiting.append(self._pool.submit(function, *job))
            if len(waiting) >= 2 * self.count:
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
