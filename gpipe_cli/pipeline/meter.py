"""Measures when each instruction of a step begins and ends, by the CPU's clock or by CUDA events; the peak memory."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ..position import Position
from ..schedule.instruction import COMPUTE, Instruction, Op
from ..schedule.simulate import Span

Mark: TypeAlias = Any  # a moment: seconds of the machine's monotonic clock, or a torch.Event

# The kind of time of each operation of a cell. A cell waits for activations from the cell before it and for gradients
# from the cell behind it.
TIME_OF = {op: op.name.lower() for op in COMPUTE}
TIME_OF |= {Op.RECEIVE_ACTIVATION: "waiting_for_activation", Op.RECEIVE_GRADIENT: "waiting_for_gradient"}
TIME_OF |= dict.fromkeys((Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.BRING, Op.TAKE_AWAY), "sending")
KINDS_OF_TIME = tuple(dict.fromkeys(TIME_OF.values()))  # seconds per cell
HOST_PHASES = {"data": "reading the next mini-batch", "exchange": "exchanging the results of the step"}
DEVICE_PHASES = {"gradients": "adding up the gradients", "update": "updating the weights"}  # run asynchronously
PHASES = HOST_PHASES | DEVICE_PHASES  # between the instructions of two steps: the work as an error report names it
WORKER_NUMBERS = ("late", "span", "busy", "waited_for_data", "memory_bytes", *PHASES)


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

    Args:
        device: this worker's.
        where: told the step and the phase that run.

    Attributes:
        began: begin of the step by the machine's monotonic clock, which all its processes share.
        spans: spans of the last step that was read, in seconds of that clock.
    """

    def __init__(self, device: torch.device, where: Position) -> None:
        self._where, self._device, self._on_gpu = where, device, device.type != "cpu"
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        self._phase_marks: list[tuple[str, Mark, Mark]] = []
        self._phases_before = self._phase_marks
        self.began, self._started, self._host_began = 0.0, 0.0, 0.0
        self.spans: list[Span] = []

    def begin_step(self, number: int | None = None) -> None:
        """Starts the clock; ``number`` of the step, from 1."""
        self._where.step = number
        self._phases_before, self._phase_marks, self._marks = self._phase_marks, [], []
        self.began = self._host_began = time.perf_counter()
        self._started = self.mark()

    @property
    def elapsed(self) -> float:
        """Returns the seconds since `begin_step` by the host's clock."""
        return time.perf_counter() - self._host_began

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
    def phase(self, name: str) -> Iterator[None]:
        """Records the time of the body, one of `PHASES`, and names its work in error reports."""
        now = self.mark if name in DEVICE_PHASES else time.perf_counter
        started = now()
        with self._where.doing(PHASES[name]):
            yield
        self._phase_marks.append((name, started, now()))

    def recording(self) -> list[tuple[str, float, float]]:
        """Returns name, begin and end of each instruction and each phase since; on a GPU waits for its work first."""
        if self._on_gpu:
            torch.get_device_module(self._device).synchronize(self._device)
        phases = [(name, self._time(a), self._time(b)) for name, a, b in self._phase_marks]
        return [*((str(span.instruction), span.start, span.end) for span in self.spans), *phases]

    def seconds(self) -> dict[tuple[Op, int], float]:
        """Returns the seconds per (kind of instruction, cell) in the last step that was read."""
        sums: dict[tuple[Op, int], float] = defaultdict(float)
        for instruction, start, end in self.spans:
            sums[instruction.op, instruction.cell] += end - start
        return dict(sums)

    def _time(self, mark: Mark) -> float:
        return mark if isinstance(mark, float) else self.began + seconds_between(self._started, mark)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this worker in bytes: taken from its GPU by torch, or resident in its process."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
