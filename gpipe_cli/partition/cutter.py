"""Finds the cut whose step takes the least seconds: even workers first, then layers moved while the step gets shorter.

What a worker does with a layer in a step depends on its place in the pipeline: under 1f1b the last worker recomputes
nothing. So every worker has seconds of its own for each layer. Even workers do not always make the shortest step: with
few micro-batches the pipeline fills and drains for a large part of it, and cells in rounds wait for each other.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from ..config import ROUND_ROBIN, PipelineConfig
from ..schedule.instruction import COMPUTE, Instruction, InstructionLists, Message, Op, execution_order
from ..schedule.orders import runs_of
from ..schedule.schedule import kept_graphs, schedule
from .cost import LayerTimes
from .partition import Floats, Places, checked_places, divide, even_placement

GAIN = 2e-3  # of a step: times are not known so exactly that less would be worth another cut
MARGIN = 0.02  # of a worker's memory: shares leave out messages on their way
MOST_SIMULATED = 15_000  # instructions of a step; of a longer one the slowest cell of each round counts
MANY = 32  # parts, beyond which one layer is moved at a time
TOO_MUCH = 1e30  # seconds of a step that does not fit


@dataclass(frozen=True)
class Memory:
    """Describes the memory of each worker.

    Attributes:
        used: function (worker, start, stop) that returns the bytes of the worker with layers start to stop - 1; never
            less with more layers.
        limits: most bytes of each worker.
    """

    used: Callable[[int, int, int], float]
    limits: Sequence[float]


class Cutter:
    """Cuts one model for one pipeline.

    Args:
        times: times of each layer, in any unit.
        config: the section `pipeline`.
        workers: number of workers.
        inseparable: names of the layers behind which no cut may lie, by their numbers.

    Raises:
        PartitionError: as in `partition`, or K cells do not lie on so many workers.
    """

    def __init__(
        self, times: Sequence[LayerTimes], config: PipelineConfig, workers: int, inseparable: Mapping[int, str]
    ) -> None:
        self._places = checked_places([each.forward for each in times], config.K, inseparable)
        self.placement = even_placement(config, workers)
        self._times, self._speeds = times, config.speeds
        self._lists = instruction_lists(config, self.placement)
        totals = [total[self._places] for total in worker_totals(times, self._lists, self._speeds)]
        # A part is what moves: each cell in rounds, else the consecutive cells of a worker.
        in_rounds = config.schedule in ROUND_ROBIN
        parts = [(cell,) for cell in range(config.K)] if in_rounds else runs_of(self.placement)
        self._workers = [self.placement[part[0]] for part in parts]
        self._totals = [totals[worker] for worker in self._workers]
        self._least = [len(part) for part in parts]
        self._inside = cache(self._cells_inside)

    def sizes(self, memory: Memory | None = None) -> list[int]:
        """Returns the number of layers in each cell of the cut with the shortest step.

        Args:
            memory: bytes that workers need and have, of which cuts must fit if any does; None: every cut fits.
        """
        found = self._shortest()
        assert found is not None  # without memory each cell has a place
        if memory is not None and len(self._lists) > 1:
            found = self._fitting(found, memory)
        return [int(size) for size in np.diff(self._cells(found))]

    def _fitting(self, shortest: Places, memory: Memory) -> Places:
        """Returns the cut with the shortest step that fits with a margin; else the one that fits best.

        Args:
            shortest: the cut with the shortest step of all, which is returned if none fits.
        """
        most = 1 / (1 + MARGIN)
        if self._fullest(shortest, memory) <= most or sum(self._used(shortest, memory)) > sum(memory.limits):
            return shortest  # it fits; or no cut does, because all workers together have too little
        cuts = [shortest, *(self._shortest(memory, share) for share in (most, 1.0))]
        filled = [(max(most, self._fullest(cut, memory)), cut) for cut in cuts if cut is not None]
        least, cut = min(filled, key=lambda pair: pair[0])
        return cut if least <= 1 else shortest

    def _shortest(self, memory: Memory | None = None, most: float = 1.0) -> Places | None:
        """Returns the ends of the parts with the shortest step that is found; None where no cut fits.

        Args:
            most: share of its memory that a worker may fill.
        """
        last = None
        if memory is not None:
            last = [self._last(worker, memory, most) for worker in self._workers]
        ends = divide(self._totals, self._least, last)
        if ends is None:
            return None

        def seconds(cuts: Places) -> Floats:
            over = [max(0.0, self._fullest(cut, memory) - most) if memory else 0.0 for cut in cuts]
            return np.where(over, TOO_MUCH * (1 + np.array(over)), self._seconds(cuts))

        known = seconds(ends[None])[0]
        while len(moved := self._neighbours(ends)):
            found = seconds(moved)
            if found.min() >= known * (1 - GAIN):
                break
            ends, known = moved[found.argmin()], found.min()
        return ends

    def _neighbours(self, ends: Places) -> Places:
        """Returns the cuts that one of `_moves` makes of this one, one a row."""
        moved = ends + self._moves
        return moved[(np.diff(moved, axis=1) >= self._least).all(axis=1)]

    @cached_property
    def _moves(self) -> Places:
        """Returns the changes of the parts' ends that are tried, one a row.

        One end moves by one place or two, or two ends move by one. With many parts only the first is tried.
        """
        one = np.eye(len(self._totals) + 1, dtype=int)[1:-1]
        one = np.concatenate([one, -one])
        if len(self._totals) > MANY:
            return one
        return np.unique(np.concatenate([one, *(one + each for each in one)]), axis=0)

    def _last(self, worker: int, memory: Memory, most: float) -> Places:
        """Returns for each place, as a part's begin, the last end up to which its layers fit a worker.

        Args:
            most: share of the worker's memory that they may fill.
        """
        found, stop, room = [], 0, most * memory.limits[worker]
        places = self._places.tolist()
        for start, begin in enumerate(places):
            stop = max(stop, start)
            while stop + 1 < len(places) and memory.used(worker, begin, places[stop + 1]) <= room:
                stop += 1
            found.append(stop)
        return np.array(found)

    def _used(self, ends: Places, memory: Memory) -> list[float]:
        """Returns the bytes that each worker holds with a cut."""
        used = [0.0] * len(self._lists)
        for worker, (start, stop) in zip(self._workers, pairwise(self._places[ends].tolist()), strict=True):
            used[worker] += memory.used(worker, start, stop)
        return used

    def _fullest(self, ends: Places, memory: Memory) -> float:
        """Returns the largest share of its memory that any worker fills with a cut."""
        return max(used / limit for used, limit in zip(self._used(ends, memory), memory.limits, strict=True))

    def _seconds(self, cuts: Places) -> Floats:
        """Returns the seconds of a step with each cut (rows of ``cuts``), simulated or, of a long step, estimated."""
        is_even = len(self._workers) % len(self._lists) == 0
        if sum(map(len, self._lists)) <= MOST_SIMULATED or not is_even:
            cells = np.array([self._cells(cut) for cut in cuts])
            return step_seconds(self._times, cells, self.placement, self._speeds, self._lists)
        parts = np.array(
            [total[ends[1]] - total[ends[0]] for total, ends in zip(self._totals, pairwise(cuts.T), strict=True)]
        )
        paces: Floats = parts.reshape(-1, len(self._lists), len(cuts)).max(axis=1).sum(axis=0)
        return paces

    def _cells(self, ends: Places) -> Places:
        """Returns 0 and the ends of the cells, in layers, for 0 and the ends of the parts.

        The cells within a part are as equal as possible.
        """
        if len(self._totals) == len(self.placement):
            return self._places[ends]
        inside = (self._inside(*each) for each in zip(range(len(ends)), ends.tolist(), ends[1:].tolist(), strict=False))
        return self._places[[0, *(place for places in inside for place in places)]]

    def _cells_inside(self, part: int, start: int, stop: int) -> list[int]:
        """Returns the ends, as places, of the cells of a part that reaches from place start to place stop."""
        cells = divide([self._totals[part][start : stop + 1]] * self._least[part], [1] * self._least[part])
        assert cells is not None
        return [start + int(end) for end in cells[1:]]


def instruction_lists(config: PipelineConfig, placement: Sequence[int]) -> list[list[Instruction]]:
    """Returns each worker's list of instructions for a training step."""
    keep = kept_graphs(config.policy, config.K, config.M)
    return schedule(config.schedule, placement, config.M, keep, config.offload)


def step_seconds(
    times: Sequence[LayerTimes],
    cuts: Places,
    placement: Sequence[int],
    speeds: Sequence[float] | None,
    lists: InstructionLists,
) -> Floats:
    """Simulates a step with each of some cuts and returns its length, in the unit of ``times``; messages take no time.

    Args:
        times: times of each layer.
        cuts: one cut a row: 0 and the ends of the cells, in layers.
        speeds: the workers' speeds; None: all alike.
        lists: each worker's instructions.
    """
    phase, faster = phases(lists), np.array([speeds[worker] if speeds else 1.0 for worker in placement])
    # By pass: seconds [cell, cut]. The clocks are [worker, cut].
    cells = {name: (np.diff(running[cuts]) / faster).T for name, running in _running(times).items()}
    clock, arrival = np.zeros((len(lists), len(cuts))), dict[Message, Floats]()
    for worker, instruction in execution_order(lists):
        if (sent := instruction.sent_message) is not None:
            arrival[sent] = clock[worker].copy()
        elif (awaited := instruction.awaited_message) is not None:
            np.maximum(clock[worker], arrival.pop(awaited), out=clock[worker])
        elif (name := phase(instruction)) is not None:
            clock[worker] += cells[name][instruction.cell]
    longest: Floats = clock.max(axis=0)
    return longest


def _running(times: Sequence[LayerTimes]) -> dict[str, Floats]:
    """Returns by the name of each pass (`LayerTimes`) the running total of its seconds over the layers, from 0 on."""
    return {name: np.cumsum([0.0, *(getattr(each, name) for each in times)]) for name in asdict(times[0])}


def durations(times: Sequence[LayerTimes], lists: InstructionLists) -> Callable[[Instruction], float]:
    """Returns the function that `simulate` calls for the seconds of each computation.

    Args:
        times: times of each cell.
    """
    phase = phases(lists)

    def seconds(instruction: Instruction) -> float:
        name = phase(instruction)
        return 0.0 if name is None else float(getattr(times[instruction.cell], name))

    return seconds


def worker_totals(times: Sequence[LayerTimes], lists: InstructionLists, speeds: Sequence[float] | None) -> list[Floats]:
    """Returns for each worker the running total over the layers of the seconds that each takes there in a step.

    Args:
        times: times of each layer.
        lists: each worker's instructions.
        speeds: the workers' speeds; None or empty: all alike.
    """
    running, phase, totals = _running(times), phases(lists), []
    for worker, instructions in enumerate(lists):
        counts = Counter(phase(i) for i in instructions)
        slower = len({i.cell for i in instructions}) * (speeds[worker] if speeds else 1.0)  # a layer is in one cell
        totals.append(np.sum([counts[name] / slower * seconds for name, seconds in running.items()], axis=0))
    return totals


def phases(lists: InstructionLists) -> Callable[[Instruction], str | None]:
    """Returns a function that names the field of `LayerTimes` for a computation in ``lists``; None: it takes no time.

    No worker waits for a gradient of cell 0's inputs. So the first half of its backward is all of it, and the second
    takes no time.
    """
    recomputed = {(i.cell, i.micro_batch) for each in lists for i in each if i.op is Op.RECOMPUTE}

    def phase(i: Instruction) -> str | None:
        if i.op not in COMPUTE:
            return None
        if i.cell == 0 and i.op in (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT):
            return "backward" if i.op is Op.INPUT_GRADIENT else None
        without_graph = i.op is Op.FORWARD and (i.cell, i.micro_batch) in recomputed
        return "inference" if without_graph else i.op.name.lower()

    return phase
