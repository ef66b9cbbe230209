"""Handles requests to stop a run: notes the signals, and ends a rank that cannot stop in time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Ctrl-C reaches a rank twice at once, from the terminal and from torchrun; only a later signal is a second request.
SECOND_REQUEST_SECONDS = 1.0
LAST_LINE_SECONDS = 1.0  # to print why the process ends, in case nobody reads its output any more
OTHER_REQUEST, END = b"\0", b"\xff"  # sent beside the signals' own numbers


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP inside its `with` block, where they no longer interrupt anything.

    SIGINT is noted even where it was ignored (`command &` in a script), so that `kill -INT` works; an ignored SIGHUP
    stays ignored, for `nohup`. Outside the main thread Python cannot handle signals, so nothing is noted there. Forked
    children get the previous handlers back, or `multiprocessing.Pool.terminate` would wait for ever.

    Args:
        on_signal: called in the main thread, between two of its Python instructions.
        wake: descriptor of a non-blocking socket that gets each signal's number as one byte at once, even while the
            main thread waits in compiled code.
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
            self.restore()

    def restore(self) -> None:
        """Puts the previous handlers back."""
        if self._previous_wake is not None:
            signal.set_wakeup_fd(self._previous_wake)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received.append(signal.Signals(number))
        if self._on_signal:
            self._on_signal()

    def interruption(self) -> BaseException | None:
        """Returns the exception that ends the command; a sweep does not take it for a failed job."""
        if not self.received:
            return None
        first = self.received[0]
        return KeyboardInterrupt() if first == signal.SIGINT else SystemExit(128 + first)


_entered: list[StopSignals] = []


def _restore_in_child() -> None:
    while _entered:
        _entered.pop().restore()


os.register_at_fork(after_in_child=_restore_in_child)


class StopDeadline:
    """Ends this process upon a second signal, or some time after the first request to stop, inside its `with` block.

    A rank that waits for a peer inside gloo or NCCL runs no Python, so it cannot handle a signal. But Python writes
    the signal's number to the socket `wake` at once (see StopSignals), and a thread of this class reads it there.

    Args:
        grace_seconds: from the first request until the process is ended.
        who: returns the rank and its place, for the last line; called in the thread.
    """

    def __init__(self, grace_seconds: float, who: Callable[[], str]) -> None:
        self._grace_seconds = grace_seconds
        self._who = who
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop deadline", daemon=True)

    @property
    def wake(self) -> int:
        """Returns the descriptor for `StopSignals(wake=)`."""
        return self._writer.fileno()

    def start(self) -> None:
        """Starts the time after a request that was no signal; the first signal after it is not a second request."""
        self._writer.send(OTHER_REQUEST)

    def __enter__(self) -> StopDeadline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.send(END)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        first = first_signal = None
        while True:
            try:
                received = self._reader.recv(64)
            except TimeoutError:
                _leave(
                    f"{self._who()} had not ended {self._grace_seconds:g} s after the request to stop "
                    "(launch.grace_seconds): ended now, saved or not"
                )
            if END in received:
                return
            now = time.monotonic()
            for number in received:
                if number in REQUESTS:
                    if first_signal is not None and now - first_signal > SECOND_REQUEST_SECONDS:
                        _leave(f"{self._who()} was asked to stop a second time: ended at once")
                    first_signal = now if first_signal is None else first_signal
                elif number != OTHER_REQUEST[0]:
                    continue  # a signal with a handler of its own
                first = now if first is None else first
            if first is not None:
                self._reader.settimeout(max(0.001, first + self._grace_seconds - now))


def _leave(line: str) -> None:
    """Prints `line` and ends the process; not through `sys.stderr`, whose lock the main thread may hold for ever."""

    def write() -> None:
        os.write(2, f"{line}\n".encode(errors="replace"))
        sys.stdout.flush()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(LAST_LINE_SECONDS)
    os._exit(1)
