"""Where a step's time goes: seconds per cell and kind of instruction, on the CPU's clock or by CUDA events."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from .schedule import Op

COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD)
WAITING = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)


class Meter:
    """Adds up the time between `start` and `stop` of each instruction.

    On a GPU the instructions run behind the host's back, so events are recorded in their stream and read when the step
    has ended anyway; nothing is synchronised in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._seconds: dict[tuple[Op, int], float] = defaultdict(float)
        self._events: list[tuple[Op, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0

    def start(self) -> float | torch.cuda.Event:
        if self._on_gpu:
            return self._event()
        return time.perf_counter()

    def stop(self, op: Op, cell: int, started: float | torch.cuda.Event) -> None:
        if isinstance(started, float):
            self._seconds[op, cell] += time.perf_counter() - started
        else:
            self._events.append((op, cell, started, self._event()))

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self) -> float:
        """Seconds since `begin_step`; on a GPU waits for its work first."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._began

    def take(self) -> dict[tuple[Op, int], float]:
        """Seconds per (kind of instruction, cell) since the last call; call it after `end_step`."""
        for op, cell, before, after in self._events:
            self._seconds[op, cell] += before.elapsed_time(after) / 1000
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
