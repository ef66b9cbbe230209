"""Measures when each instruction of a step begins and ends, by the CPU's clock or by CUDA events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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


class Meter:
    """Records the instructions of one step after another, and the phases that follow them.

    On a GPU the instructions run asynchronously, so events are recorded in their stream and read when the step has
    ended; nothing is synchronised in between.

    Attributes:
        began: begin of the step by the machine's monotonic clock, which all its processes share.
        spans: of the last finished step, in seconds of that clock.
        phases: that followed this step, as far as `read_phases` has read them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type != "cpu"
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        self._phase_marks: list[tuple[str, Mark, Mark]] = []
        self.began = 0.0
        self._began_on_gpu: torch.Event | None = None
        self.spans: list[Span] = []
        self.phases: list[Phase] = []

    def begin_step(self) -> None:
        """Starts the clock."""
        self.read_phases()
        if self._on_gpu:
            self._began_on_gpu = event_now(self._device)
        self.began = time.perf_counter()

    def mark(self) -> Mark:
        """Returns the present moment."""
        return event_now(self._device) if self._on_gpu else time.perf_counter()

    def record(self, instruction: Instruction, started: Mark) -> None:
        """Records that ``instruction`` has run from ``started`` to now."""
        self._marks.append((instruction, started, self.mark()))

    def end_step(self) -> float:
        """Fills `spans` and returns the seconds since `begin_step`; on a GPU waits for its work first."""
        if self._on_gpu:
            self._synchronize()
        seconds = time.perf_counter() - self.began
        self.spans = [Span(instruction, self._time(a), self._time(b)) for instruction, a, b in self._marks]
        self.phases = []
        self._marks.clear()
        return seconds

    @contextmanager
    def phase(self, name: str, on_device: bool = False) -> Iterator[None]:
        """Records the time of the body. ``on_device``: its work runs on the device, asynchronously."""
        device = on_device and self._on_gpu
        started = event_now(self._device) if device else time.perf_counter()
        yield
        self._phase_marks.append((name, started, event_now(self._device) if device else time.perf_counter()))

    def read_phases(self) -> None:
        """Fills `phases`; on a GPU waits for its work first."""
        if self._on_gpu:
            self._synchronize()
        self.phases += [Phase(name, self._time(a), self._time(b)) for name, a, b in self._phase_marks]
        self._phase_marks.clear()

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Returns the seconds per (kind of instruction, cell) in the last finished step."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)

    def _time(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._began_on_gpu is not None
        return self.began + float(self._began_on_gpu.elapsed_time(mark)) / 1000
