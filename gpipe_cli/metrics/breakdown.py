"""Computes where the time of a step goes, as the paper's table 4 does, from the meter's measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..schedule.instruction import COMPUTE, InstructionLists, Op
from ..schedule.simulate import Timeline, simulate

Durations = Mapping[tuple[Op, int], float]  # seconds of one instruction, by kind and cell; kinds in `COMPUTE` only


@dataclass(frozen=True)
class Breakdown:
    """Holds shares of the workers' time in a step: W workers times the seconds from the begin to the update's end.

    The names are Table 4's; the paper does not define them, so these definitions are ours. They add up to 1.

    Attributes:
        computation: forward and backward.
        recomputation: forward computed again in backward (section 2.3).
        bubble: what the schedule itself leaves idle: its simulation with the same work spread evenly over the workers
            and with messages that take no time. Early recompute is in it, so it can be less than (K-1)/(M+K-1).
        load_imbalance: what the simulation with the cells' own measured times leaves idle beyond that.
        setup: all other time: sending and messages under way, reading data, the exchange of reports and plans, sums
            over replicas, and unsteady times.
        weight_update: clipping, optimizer, moving averages; the mean over the workers.
    """

    computation: float
    recomputation: float
    bubble: float
    load_imbalance: float
    setup: float
    weight_update: float

    def shares(self) -> dict[str, float]:
        """Returns the shares by name, in the order of table 4."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns one line: "computation 65.6 %, recomputation 22.5 %, …"."""
        return ", ".join(f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in self.shares().items())


def mean_breakdown(
    lists: InstructionLists,
    placement: Sequence[int],
    cells: Sequence[Mapping[str, float]],
    updates: Sequence[float],
    step_seconds: float,
) -> Breakdown:
    """Returns the shares of a step (paper, Table 4).

    Args:
        lists: one list of instructions per worker, those that ran.
        placement: worker of each cell.
        cells: as in `durations_of_cells`.
        updates: seconds of every worker's weight update.
        step_seconds: of the whole step, with its update and the wait for data.
    """
    counts, workers, durations = count_computations(lists), len(lists), durations_of_cells(lists, cells)
    whole, update = workers * step_seconds, workers * (sum(updates) / len(updates))
    busy = sum(count * durations[key] for key, count in counts.items())
    again = sum(count * durations[key] for key, count in counts.items() if key[0] is Op.RECOMPUTE)
    # Measured times vary and the simulation uses their means, so limit each share to the time that is left.
    left = max(0.0, whole - busy - update)
    bubble = min(left, idle_seconds(simulate_with(lists, placement, even_durations(lists, placement, durations))))
    imbalance = min(left - bubble, max(0.0, idle_seconds(simulate_with(lists, placement, durations)) - bubble))
    shares = [busy - again, again, bubble, imbalance, left - bubble - imbalance, update]
    total = sum(shares)  # more than `whole` if computation and update together seem longer than the step
    return Breakdown(*(share / total for share in shares))


def predicted_bubble(lists: InstructionLists, placement: Sequence[int], cells: Sequence[Mapping[str, float]]) -> float:
    """Returns the bubble of the schedule, simulated with the mean time that each cell's instructions took in a step."""
    return simulate_with(lists, placement, durations_of_cells(lists, cells)).bubble


def simulate_with(lists: InstructionLists, placement: Sequence[int], durations: Durations) -> Timeline:
    """Returns the timeline of the lists with these durations and messages that take no time."""
    return simulate(lists, placement, lambda instruction: durations[instruction.op, instruction.cell])


def idle_seconds(timeline: Timeline) -> float:
    """Returns the seconds without computation between a step's begin and its end, of all workers together."""
    return len(timeline.spans) * timeline.span - sum(timeline.busy)


def count_computations(lists: InstructionLists) -> Counter[tuple[Op, int]]:
    """Returns how often a step runs each kind of computation of each cell."""
    return Counter((i.op, i.cell) for instructions in lists for i in instructions if i.op in COMPUTE)


def durations_of_cells(lists: InstructionLists, cells: Sequence[Mapping[str, float]]) -> dict[tuple[Op, int], float]:
    """Returns the mean seconds of one instruction.

    Args:
        cells: for each cell the seconds that a step spent in each kind, by the kind's name in small letters.
    """
    return {(op, cell): cells[cell][op.name.lower()] / n for (op, cell), n in count_computations(lists).items()}


def mean_durations(timeline: Timeline) -> dict[tuple[Op, int], float]:
    """Returns the mean duration of one computation, by kind and cell."""
    taken: dict[tuple[Op, int], list[float]] = {}
    for spans in timeline.spans:
        for instruction, start, end in spans:
            if instruction.op in COMPUTE:
                taken.setdefault((instruction.op, instruction.cell), []).append(end - start)
    return {key: sum(seconds) / len(seconds) for key, seconds in taken.items()}


def even_durations(
    lists: InstructionLists, placement: Sequence[int], durations: Durations
) -> dict[tuple[Op, int], float]:
    """Returns the same work spread evenly: all workers take equally long for a micro-batch, in each kind of work.

    A kind that some workers do not have at all (recompute, in the last worker of 1f1b) is spread over the others.
    """
    counts, cells_of_worker = count_computations(lists), Counter(placement)
    even: dict[tuple[Op, int], float] = {}
    for op in COMPUTE:
        keys = [key for key in counts if key[0] is op]
        workers = {placement[cell] for _, cell in keys}
        each = sum(durations[key] for key in keys) / len(workers) if workers else 0.0
        even |= {(op, cell): each / cells_of_worker[placement[cell]] for _, cell in keys}
    return even
