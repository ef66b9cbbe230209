"""Simulates a schedule: makes a timeline of instruction lists and the duration of each instruction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .instruction import COMPUTE, Instruction, InstructionLists, Message, execution_order
from .posting import Posts

Seconds = float  # or any other unit, the same for durations and latency


class Span(NamedTuple):
    """Holds begin and end of one instruction. A receive lasts at least as long as it waits."""

    instruction: Instruction
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """Holds the begin and end of every worker's instructions, from time 0.

    Attributes:
        spans: one list per worker, in order.
        placement: ``placement[cell]`` is the cell's worker.
    """

    spans: list[list[Span]]
    placement: tuple[int, ...]

    @cached_property
    def span(self) -> Seconds:
        """Returns the length of the step, from time 0 to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> list[Seconds]:
        """Returns the time that each worker computes."""
        return [sum(s.end - s.start for s in spans if s.instruction.op in COMPUTE) for spans in self.spans]

    @property
    def bubble(self) -> float:
        """Returns the share of the workers' time without computation: idle ends, waits and uneven cells together."""
        whole = self.span * len(self.spans)
        return 1 - sum(self.busy) / whole if whole > 0 else 0.0

    @property
    def micro_batches(self) -> int:
        """Returns the number of micro-batches, M."""
        return 1 + max((s.instruction.micro_batch for spans in self.spans for s in spans), default=-1)


def simulate(
    lists: InstructionLists,
    placement: Sequence[int],
    duration: Callable[[Instruction], Seconds],
    latency: Seconds | Callable[[Instruction], Seconds] = 0.0,
    host: Seconds = 0.0,
    posts: Sequence[Posts] | None = None,
) -> Timeline:
    """Simulates the lists on an ideal machine, where each worker starts an instruction as soon as possible.

    Args:
        lists: one list per worker.
        placement: ``placement[cell]`` is the cell's worker.
        duration: returns the time of an instruction; called only for kinds in ``COMPUTE``.
        latency: time from a send to the moment the other worker can go on: one number, or a function of the send.
            Messages travel while workers compute and while other messages travel.
        host: time that each send and each receive takes from its own worker; a receive takes it while it waits.
        posts: receives of each worker by the position before which it posts them, if a message travels only from
            then on (NCCL).

    Raises:
        ScheduleError: the workers wait for each other in a circle.
    """
    clock = [0.0] * len(lists)
    sent_at: dict[Message, Seconds] = {}
    travels: dict[Message, Seconds] = {}
    posted_at: dict[Instruction, Seconds] = {}
    spans: list[list[Span]] = [[] for _ in lists]
    for worker, instruction in execution_order(lists):
        start = end = clock[worker]
        if posts is not None:
            posted_at |= dict.fromkeys(posts[worker].get(len(spans[worker]), ()), start)
        if (sent := instruction.sent_message) is not None:
            end = start + host
            sent_at[sent], travels[sent] = end, latency(instruction) if callable(latency) else latency
        elif (awaited := instruction.awaited_message) is not None:
            begins = max(sent_at[awaited], posted_at.get(instruction, 0.0))
            end = max(start + host, begins + travels[awaited])
        elif instruction.op in COMPUTE:
            end = start + duration(instruction)
        clock[worker] = end
        spans[worker].append(Span(instruction, start, end))
    return Timeline(spans, tuple(placement))


def unit_durations(instruction: Instruction) -> Seconds:
    """Returns 1 for every instruction, as in the paper's figure 2c."""
    return 1.0
