"""Measures when each instruction of a step begins and ends, by the CPU's clock or by CUDA events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ..schedule.instruction import Instruction, Op
from ..schedule.simulate import Span

Mark: TypeAlias = Any  # a moment: seconds of the machine's monotonic clock, or a torch.Event


def event_now(device: torch.device) -> torch.Event:
    """Returns an event that the GPU records after all work that was started before."""
    kind = torch.get_device_module(device)
    event: torch.Event = kind.Event(enable_timing=True)
    event.record(kind.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Returns the seconds from one mark to another of the same kind."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


class Meter:
    """Records the instructions of one step after another, and the phases that follow them.

    On a GPU the instructions run asynchronously, so events are recorded in their stream and read when the results of
    the step have been; nothing is synchronised in between.

    Attributes:
        began: begin of the step by the machine's monotonic clock, which all its processes share.
        spans: of the last step that was read, in seconds of that clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type != "cpu"
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        self._phase_marks: list[tuple[str, Mark, Mark]] = []
        self._phases_before = self._phase_marks
        self.began, self._started = 0.0, 0.0
        self.spans: list[Span] = []

    def begin_step(self) -> None:
        """Starts the clock."""
        self._phases_before, self._phase_marks, self._marks = self._phase_marks, [], []
        self.began, self._started = time.perf_counter(), self.mark()

    def mark(self) -> Mark:
        """Returns the present moment."""
        return event_now(self._device) if self._on_gpu else time.perf_counter()

    def record(self, instruction: Instruction, started: Mark) -> None:
        """Records that ``instruction`` has run from ``started`` to now."""
        self._marks.append((instruction, started, self.mark()))

    def read_step(self, reached: Mark = None) -> tuple[dict[str, float], float]:
        """Fills `spans`; on a GPU waits for the instructions first, and sets `began` to when it began, not its host.

        Args:
            reached: a later mark, for which the host has just waited.

        Returns:
            The seconds of each phase before the step, and those from its begin to the end of its last instruction.
        """
        ended = self._marks[-1][2] if self._marks else self._started
        if self._on_gpu:
            reached = reached or ended
            reached.synchronize()
            self.began = time.perf_counter() - seconds_between(self._started, reached)
        self.spans = [Span(instruction, self._time(a), self._time(b)) for instruction, a, b in self._marks]
        return {n: seconds_between(a, b) for n, a, b in self._phases_before}, seconds_between(self._started, ended)

    @contextmanager
    def phase(self, name: str, on_device: bool = False) -> Iterator[None]:
        """Records the time of the body. ``on_device``: its work runs on the device, asynchronously."""
        started = self.mark() if on_device else time.perf_counter()
        yield
        self._phase_marks.append((name, started, self.mark() if on_device else time.perf_counter()))

    def read_phases(self) -> list[tuple[str, float, float]]:
        """Returns name, begin and end of each phase since the instructions; on a GPU waits for its work first."""
        if self._on_gpu:
            torch.get_device_module(self._device).synchronize(self._device)
        return [(name, self._time(a), self._time(b)) for name, a, b in self._phase_marks]

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Returns the seconds per (kind of instruction, cell) in the last step that was read."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)

    def _time(self, mark: Mark) -> float:
        return mark if isinstance(mark, float) else self.began + seconds_between(self._started, mark)
