"""Where a step's time goes: when each instruction began and ended, by the CPU's clock or by CUDA events."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from .schedule import Instruction, Op
from .simulate import Span

WAITING = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)

Mark = float | torch.cuda.Event


class Meter:
    """Records the instructions of one step after another.

    On a GPU the instructions run behind the host's back, so events are recorded in their stream and read when the step
    has ended anyway; nothing is synchronised in between.

    Attributes:
        spans: of the last finished step, in seconds of the machine's monotonic clock, which all its processes share.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        self._began = 0.0
        self._began_on_gpu: torch.cuda.Event | None = None
        self.spans: list[Span] = []

    def begin_step(self) -> None:
        """Forgets what was recorded since the last step (evaluations) and starts the clock."""
        self._marks.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._began_on_gpu = self._event()
        self._began = time.perf_counter()

    def mark(self) -> Mark:
        """The present moment."""
        return self._event() if self._on_gpu else time.perf_counter()

    def record(self, instruction: Instruction, started: Mark) -> None:
        """``instruction`` has run from ``started`` to now."""
        self._marks.append((instruction, started, self.mark()))

    def end_step(self) -> float:
        """Seconds since `begin_step`; on a GPU waits for its work first. Fills `spans`."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        self.spans = [Span(instruction, self._time(a), self._time(b)) for instruction, a, b in self._marks]
        self._marks.clear()
        return seconds

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Seconds per (kind of instruction, cell) in the last finished step."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)

    def _time(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._began_on_gpu is not None
        return self._began + float(self._began_on_gpu.elapsed_time(mark)) / 1000

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self._device))
        return event
