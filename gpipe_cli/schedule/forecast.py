"""How long a step should take: `simulate` without its spans, fast enough to be asked after every training step.

The order in which the lists can run depends only on the lists, so it is found once; a forecast is then one pass over
it, with the times that were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .instruction import COMPUTE, InstructionLists, Message, Op, execution_order

Durations = Mapping[tuple[Op, int], float]  # seconds of one instruction, by kind and cell; of `COMPUTE` only
_RUN, _SEND, _AWAIT = range(3)


@dataclass(frozen=True)
class Forecast:
    """The length of a step of these lists, whatever its durations.

    Attributes:
        lists: one list of instructions per worker.
        placement: ``placement[cell]`` is the cell's worker.
    """

    lists: InstructionLists
    placement: Sequence[int]

    @cached_property
    def counts(self) -> dict[tuple[Op, int], int]:
        """How often a step runs each kind of computation of each cell."""
        return dict(Counter((i.op, i.cell) for instructions in self.lists for i in instructions if i.op in COMPUTE))

    @cached_property
    def _order(self) -> list[tuple[int, int, int]]:
        """(worker, what it does, which duration or which message), in an order that one process could execute."""
        duration = {key: number for number, key in enumerate(self.counts)}
        messages: dict[Message, int] = {}
        order = []
        for worker, instruction in execution_order(self.lists):
            if (sent := instruction.sent_message) is not None:
                order.append((worker, _SEND, messages.setdefault(sent, len(messages))))
            elif (awaited := instruction.awaited_message) is not None:
                order.append((worker, _AWAIT, messages[awaited]))
            else:
                order.append((worker, _RUN, duration[instruction.op, instruction.cell]))
        return order

    def span(self, durations: Durations) -> float:
        """From the first start to the last end, with messages that take no time (as in `simulate`)."""
        seconds = [durations[key] for key in self.counts]
        clock, arrival = [0.0] * len(self.lists), [0.0] * len(self._order)
        for worker, what, which in self._order:
            if what == _RUN:
                clock[worker] += seconds[which]
            elif what == _SEND:
                arrival[which] = clock[worker]
            elif arrival[which] > clock[worker]:
                clock[worker] = arrival[which]
        return max(clock)

    def busy(self, durations: Durations) -> float:
        """Seconds of computation in a step, of all workers together."""
        return sum(count * durations[key] for key, count in self.counts.items())

    def idle(self, durations: Durations) -> float:
        """Seconds without computation between the step's begin and its end, of all workers together."""
        return len(self.lists) * self.span(durations) - self.busy(durations)

    def bubble(self, durations: Durations) -> float:
        """The idle share, as `simulate` finds it."""
        whole = len(self.lists) * self.span(durations)
        return self.idle(durations) / whole if whole > 0 else 0.0

    def mean_durations(self, seconds: Sequence[Mapping[str, float]]) -> dict[tuple[Op, int], float]:
        """Seconds of one instruction of each kind.

        Args:
            seconds: for each cell what a whole step spent in each kind, by the kind's name in small letters.
        """
        return {(op, cell): seconds[cell][op.name.lower()] / count for (op, cell), count in self.counts.items()}

    def even_durations(self, durations: Durations) -> dict[tuple[Op, int], float]:
        """The same work spread evenly: every worker takes equally long for a micro-batch, in each kind of computation.

        A kind that some workers do not have at all (recompute, in the last worker of 1f1b) is spread over the others.
        """
        cells = Counter(self.placement)
        even: dict[tuple[Op, int], float] = {}
        for op in COMPUTE:
            keys = [key for key in self.counts if key[0] is op]
            workers = {self.placement[cell] for _, cell in keys}
            each = sum(durations[key] for key in keys) / len(workers) if workers else 0.0
            even |= {key: each / cells[self.placement[key[1]]] for key in keys}
        return even
