"""Requests to stop, noted without interrupting anything."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered, instead of letting them interrupt anything.

    SIGINT is noted even where it was ignored (`command &` in a script), so that `kill -INT` works; an ignored SIGHUP
    stays ignored, because that is what `nohup` is for. Outside the main thread Python can note nothing.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self.received: list[signal.Signals] = []
        self._on_signal = on_signal
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread
                break
        return self

    def __exit__(self, *_: object) -> None:
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
