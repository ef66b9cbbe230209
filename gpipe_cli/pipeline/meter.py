"""Measures when each instruction of a step begins and ends, by the CPU's clock or by CUDA events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch

from ..schedule.instruction import Instruction, Op
from ..schedule.simulate import Span

Mark = float | torch.Event


def event_now(device: torch.device) -> torch.Event:
    """Returns an event that the GPU records after all work that was started before."""
    kind = torch.get_device_module(device)
    event: torch.Event = kind.Event(enable_timing=True)
    event.record(kind.current_stream(device))
    return event


class Phase(NamedTuple):
    """Holds one activity of a worker between the instructions of two steps, in seconds of the meter's clock."""

    name: str
    start: float
    end: float


class _Clock(NamedTuple):
    """Turns marks into seconds of the machine's monotonic clock; an event by its distance from ``event``."""

    began: float
    event: Mark

    def time(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert not isinstance(self.event, float)
        return self.began + float(self.event.elapsed_time(mark)) / 1000

    def phases(self, marks: list[tuple[str, Mark, Mark]]) -> list[Phase]:
        return [Phase(name, self.time(a), self.time(b)) for name, a, b in marks]


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
        self.began = 0.0
        self._clock, self._ended = _Clock(0.0, 0.0), cast(Mark, 0.0)
        self._before = self._clock, self._phase_marks
        self.spans: list[Span] = []

    def begin_step(self) -> None:
        """Starts the clock."""
        self._before = self._clock, self._phase_marks
        self._phase_marks, self._marks = [], []
        started = self.mark()
        self.began = time.perf_counter()
        self._clock = _Clock(self.began, started)

    def mark(self) -> Mark:
        """Returns the present moment."""
        return event_now(self._device) if self._on_gpu else time.perf_counter()

    def record(self, instruction: Instruction, started: Mark) -> None:
        """Records that ``instruction`` has run from ``started`` to now."""
        self._marks.append((instruction, started, self.mark()))

    def end_step(self) -> None:
        """Records that all instructions have been started."""
        self._ended = self.mark()

    def read_step(self) -> tuple[list[Phase], float]:
        """Fills `spans`; on a GPU waits for the instructions first.

        Returns:
            The phases before the step, and the seconds from its begin to the end of its last instruction.
        """
        if not isinstance(self._ended, float):
            self._ended.synchronize()
        time_of = self._clock.time
        self.spans = [Span(instruction, time_of(a), time_of(b)) for instruction, a, b in self._marks]
        clock, marks = self._before
        return clock.phases(marks), time_of(self._ended) - self.began

    @contextmanager
    def phase(self, name: str, on_device: bool = False) -> Iterator[None]:
        """Records the time of the body. ``on_device``: its work runs on the device, asynchronously."""
        started = self.mark() if on_device else time.perf_counter()
        yield
        self._phase_marks.append((name, started, self.mark() if on_device else time.perf_counter()))

    def read_phases(self) -> list[Phase]:
        """Returns the phases since the step's instructions; on a GPU waits for its work first."""
        if self._on_gpu:
            torch.get_device_module(self._device).synchronize(self._device)
        return self._clock.phases(self._phase_marks)

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Returns the seconds per (kind of instruction, cell) in the last step that was read."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)
