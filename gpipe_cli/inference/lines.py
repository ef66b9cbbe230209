"""Answers lines with text, in every worker: reads them from a pipe and emits the answers, in order.

Only rank 0 reads and emits; an exchange passes on to the others whether there are more lines.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Protocol

from ..distributed.exchange import Exchange
from ..launch.context import Context
from ..trainer.assembly import Assembly

TICK_SECONDS = 0.2  # between two checks whether to stop
LINGER_SECONDS = 0.05  # waits for more lines after the first: a larger batch is faster
MOST_TOKENS = 1024  # of a line, where no training sentence was longer: attention over more would fill the memory
IDLE_SECONDS = 60.0  # without a line; then all workers run an exchange, so that none times out waiting for rank 0


class Answerer(Protocol):
    """Answers lines; every worker calls `answer` at the same time, with the lines on rank 0 and none elsewhere.

    Attributes:
        at_once: lines that are answered together, at most.
    """

    at_once: int

    def answer(self, lines: list[str]) -> None: ...


def answer_lines(context: Context, assembly: Assembly, answerer: Answerer, pipe: str) -> None:
    """Answers all lines of a pipe; every worker calls it at the same time.

    Args:
        pipe: the path of a pipe with UTF-8 lines.
    """
    reader = None
    if assembly.world.rank == 0:
        reader = PipeReader(pipe, context.stop_requested, lambda: context.emit({"kind": "idle"}))
    more = Exchange({"more": 1}, assembly.world.all_ranks)
    while True:
        lines = reader.read(answerer.at_once) if reader is not None else None
        more.own["more"][0] = float(lines is not None)
        more.run()
        if not more.total["more"][0]:
            return
        answerer.answer(lines or [])


class PipeReader:
    """Reads lines from a pipe, as many as have arrived.

    Args:
        path: of the pipe; opening waits for its writer.
        stopped: whether to end reading.
        idle: called while nothing arrives, about every `TICK_SECONDS`.
    """

    def __init__(self, path: str, stopped: Callable[[], bool], idle: Callable[[], None]) -> None:
        self._pipe = os.open(path, os.O_RDONLY)
        self._stopped, self._idle = stopped, idle
        self._lines: list[str] = []
        self._rest = b""
        self._ended = False

    def read(self, most: int) -> list[str] | None:
        """Returns at most ``most`` lines; an empty list after `IDLE_SECONDS` without one; None at the end."""
        until = time.monotonic() + IDLE_SECONDS
        while not self._lines and not self._ended:
            if self._stopped():
                return None
            if not self._receive(TICK_SECONDS):
                self._idle()
                if time.monotonic() > until:
                    return []
        while len(self._lines) < most and not self._ended and self._receive(LINGER_SECONDS):
            pass
        lines, self._lines = self._lines[:most], self._lines[most:]
        return lines or None

    def _receive(self, seconds: float) -> bool:
        """Returns whether anything came within ``seconds``, the end included."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if not ready:
            return False
        received = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        if not received:
            self._ended = True
            lines, self._rest = ([self._rest] if self._rest else []), b""
        self._lines += [line.decode() for line in lines]
        return True
