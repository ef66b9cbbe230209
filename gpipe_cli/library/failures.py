"""Lets all workers raise where one does: exceptions are told, signals wait until no message is on its way."""

import builtins
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import ConfigurationError
from ..pipeline.cell import failed

TOLD = 2000  # characters of an exception's text
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


def describe(error: BaseException) -> tuple[list[str], str]:
    """Returns the names of an exception's classes, and its text with that of its causes."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    text = ": ".join("".join(traceback.format_exception_only(type(one), one)).strip() for one in causes)
    kind = getattr(error, "cause", None) or type(error)  # of a `LayerFailed`
    return [one.__name__ for one in kind.__mro__], text[:TOLD]


def failed_there(rank: int, described: tuple[list[str], str]) -> BaseException:
    """Returns the exception of a worker whose step another worker's exception has ended.

    It is of the first class of that exception that is Python's, torch's or ours, so one `except` serves all workers.
    """
    names, text = described
    others = {kind.__name__: kind for kind in (torch.OutOfMemoryError, ConfigurationError)}
    kinds = [getattr(builtins, name, others.get(name)) for name in names]
    kind = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException))
    said = f"rank {rank} has failed, and all is as before this call; the pipeline can go on. It was {text}"
    return failed(said, kind) if issubclass(kind, Exception) else kind(said)


class Signals:
    """Keeps signals, as that of Ctrl-C, from breaking off a message, for which other workers would wait."""

    def __init__(self) -> None:
        self._came: dict[int, Callable[[], Any]] = {}  # by number: one typed twice counts once

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Lets the program's handlers of signals run only in `let_through`, and at the end."""
        here = threading.current_thread() is threading.main_thread()  # Python's handlers run there alone
        handlers = {number: own for number in (_HELD_BACK if here else ()) if callable(own := signal.getsignal(number))}
        for number, handler in handlers.items():
            signal.signal(number, lambda *call, handler=handler: self._came.update({call[0]: partial(handler, *call)}))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.let_through()

    def let_through(self) -> None:
        """Runs the handlers of the signals that have come, which may raise; no message is on its way."""
        while self._came:
            self._came.popitem()[1]()
