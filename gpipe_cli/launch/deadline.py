"""The end of a rank that was asked to stop and cannot, because its main thread waits for a peer for ever."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from gpipe_cli.launch.signals import REQUESTS

# Ctrl-C reaches a rank twice at once, from the terminal and from torchrun; only a later one is a second request.
SECOND_REQUEST_SECONDS = 1.0
SAY_SECONDS = 1.0  # for the last line, where nobody may be reading any more
HEARD, END = b"\0", b"\xff"  # beside the signals' own numbers: a request that came another way; the run has ended


class StopDeadline:
    """While it is entered, ends this process upon a second signal, or some time after the first request to stop.

    Python runs signal handlers in the main thread only, between two of its instructions, so a rank that waits inside
    gloo or NCCL runs none. What Python does at once, in whichever thread a signal arrives, is to write its number to
    the socket `wake` (see StopSignals); a thread reads it here.

    Args:
        grace_seconds: from the first request until the process is ended.
        who: the rank and where it is, for the line that says so; called in the thread.
    """

    def __init__(self, grace_seconds: float, who: Callable[[], str]) -> None:
        self._grace_seconds = grace_seconds
        self._who = who
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop deadline", daemon=True)

    @property
    def wake(self) -> int:
        return self._writer.fileno()

    def heard(self) -> None:
        """A request has come by other means than a signal: its time counts, but the first signal is no second one."""
        self._writer.send(HEARD)

    def __enter__(self) -> StopDeadline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.send(END)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        first = signalled = None
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
                    if signalled is not None and now - signalled > SECOND_REQUEST_SECONDS:
                        _leave(f"{self._who()} was asked to stop a second time: ended at once")
                    signalled = now if signalled is None else signalled
                elif number != HEARD[0]:
                    continue  # a signal that somebody else handles
                first = now if first is None else first
            if first is not None:
                self._reader.settimeout(max(0.001, first + self._grace_seconds - now))


def _leave(line: str) -> None:
    """Say it and end the process; not through `sys.stderr`, whose lock the main thread may hold for ever."""

    def say() -> None:
        os.write(2, f"{line}\n".encode(errors="replace"))
        sys.stdout.flush()

    last_words = threading.Thread(target=say, daemon=True)
    last_words.start()
    last_words.join(SAY_SECONDS)
    os._exit(1)
