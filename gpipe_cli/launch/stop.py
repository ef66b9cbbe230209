"""Notes requests to stop a run: the signals that a user, a batch system or a launcher sends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Slurm announces the end of a job's time by SIGUSR1 or SIGUSR2, if asked to.
OF_BATCH_SYSTEMS = (signal.SIGUSR1, signal.SIGUSR2)
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *OF_BATCH_SYSTEMS)


class StopSignals:
    """Records `REQUESTS` inside its `with` block, where they no longer interrupt anything.

    SIGINT is noted even where it was ignored (`command &` in a script), so that `kill -INT` works; an ignored SIGHUP
    stays ignored, for `nohup`. Outside the main thread Python cannot handle signals, so nothing is noted there. Forked
    children end by such a signal, or `multiprocessing.Pool.terminate` would wait for ever.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.handle(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def handle(self, number: signal.Signals, handler: Callable[[int, Any], None]) -> None:
        """Sets the handler of a signal until the block ends."""
        with suppress(ValueError):  # not in the main thread
            self._previous[number] = signal.signal(number, handler)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lets requests to stop interrupt the block; raises one that came before it at once."""
        self.__exit__()
        if interruption := self.interruption():
            raise interruption
        try:
            yield
        finally:
            self.__enter__()

    def _note(self, number: int, _frame: object) -> None:
        """Records a signal; a forked child ends by it."""
        if os.getpid() != self._process:  # a child
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received.append(signal.Signals(number))

    def interruption(self) -> BaseException | None:
        """Returns the exception that ends the command after a request, None without one. No sweep goes on after it.

        A handler that was set before (submitit queues the job again at SIGUSR2) is called first, now that all is saved.
        """
        if not self.received:
            return None
        first = self.received[0]
        if first in OF_BATCH_SYSTEMS and callable(signal.getsignal(first)):
            signal.raise_signal(first)
        return KeyboardInterrupt() if first == signal.SIGINT else SystemExit(128 + first)


@contextmanager
def stop_noted() -> Iterator[StopSignals]:
    """Raises a request to stop only when the block has ended, because libraries in the block would swallow it."""
    signals = StopSignals()
    try:
        with signals:
            yield signals
    finally:
        if interruption := signals.interruption():
            raise interruption
