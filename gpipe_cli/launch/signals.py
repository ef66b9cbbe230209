"""Requests to stop, noted without interrupting anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered, instead of letting them interrupt anything.

    SIGINT is noted even where it was ignored (`command &` in a script), so that `kill -INT` works; an ignored SIGHUP
    stays ignored, because that is what `nohup` is for. Outside the main thread Python can note nothing. Forked children
    go by the rules from before, or `multiprocessing.Pool.terminate` would wait for ever.

    Args:
        on_signal: called in the main thread, as soon as that runs Python.
        wake: descriptor of a socket that does not block; it gets each signal's number as one byte at once, even while
            the main thread waits in compiled code.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None, wake: int | None = None) -> None:
        self.received: list[signal.Signals] = []
        self._on_signal = on_signal
        self._wake = wake
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wake: int | None = None

    def __enter__(self) -> StopSignals:
        for number in REQUESTS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread
                return self
        if self._wake is not None:
            self._previous_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _entered:
            _entered.remove(self)
            self.let_go()

    def let_go(self) -> None:
        """Put back what was there before."""
        if self._previous_wake is not None:
            signal.set_wakeup_fd(self._previous_wake)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received.append(signal.Signals(number))
        if self._on_signal:
            self._on_signal()

    def interruption(self) -> BaseException | None:
        """The exception that ends the command after these signals: one that a sweep does not take for a failed job."""
        if not self.received:
            return None
        first = self.received[0]
        return KeyboardInterrupt() if first == signal.SIGINT else SystemExit(128 + first)


_entered: list[StopSignals] = []


def _let_go_in_child() -> None:
    while _entered:
        _entered.pop().let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
