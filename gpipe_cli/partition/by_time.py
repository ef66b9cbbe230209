"""Cuts by the seconds that workers spend in a step, with what the schedule makes them recompute (`partition=auto`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from ..config import PipelineConfig
from ..schedule.instruction import COMPUTE, InstructionLists, Op
from ..schedule.orders import ROUND_ROBIN
from ..schedule.schedule import kept_graphs, schedule
from .balance import Bytes, Totals, balance, balance_rounds
from .layer_times import LayerTimes
from .partition import PartitionError, cell_layers, partition, round_robin


def cut_by_time(
    times: Sequence[LayerTimes],
    config: PipelineConfig,
    workers: int,
    inseparable: Mapping[int, str],
    bytes_: Bytes | None = None,
    room: Sequence[float] = (),
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the layers of each cell, and the worker of each cell, with the least seconds of the busiest worker.

    Args:
        times: of each layer, in any unit.
        inseparable: names of the layers behind which no cut may lie, by their numbers.
        bytes_: of a worker with the layers start to stop - 1, never less with more layers; None: all fits.
        room: most bytes of each worker.

    Raises:
        PartitionError: K cells cannot be made of the layers, or do not lie on so many workers.
        NothingFits: some worker has more bytes than room with every cut.
    """
    placement = even_placement(config.schedule, config.K, workers)
    ends = [0, *(number + 1 for number in range(len(times)) if number not in inseparable)]
    partition([1.0] * len(times), config.K, "min_variance", inseparable)  # refuses what no cut can do
    totals = [total[ends] for total in worker_totals(times, config, placement)]

    def bytes_of(worker: int, start: int, stop: int) -> float:
        return 0.0 if bytes_ is None else bytes_(worker, ends[start], ends[stop])

    known = None if bytes_ is None else bytes_of
    if config.schedule in ROUND_ROBIN:
        groups = balance_rounds(totals, config.K, known, room)
    else:
        groups = _cells_inside(balance(totals, [*Counter(placement).values()], known, room), totals, placement)
    layers = [ends[group.stop] - ends[group.start] for group in cell_layers(groups)]
    return layers, placement


def even_placement(kind: str, K: int, workers: int) -> tuple[int, ...]:
    """Returns the worker of each of K cells before they are cut: as many cells on each, the later ones one more."""
    if kind in ROUND_ROBIN:
        return round_robin(K, workers)
    if not 1 <= workers <= K:
        raise PartitionError(
            f"{workers} workers for pipeline.K={K}: every worker runs at least one cell; use 1 to {K} workers"
        )
    return tuple(workers - 1 - (K - 1 - cell) * workers // K for cell in range(K))


def _cells_inside(groups: Sequence[int], totals: Sequence[Totals], placement: Sequence[int]) -> list[int]:
    """Returns the sizes of all cells: those of each worker are as equal as possible."""
    sizes: list[int] = []
    for (worker, cells), layers in zip(sorted(Counter(placement).items()), cell_layers(groups), strict=True):
        costs = np.diff(totals[worker][layers.start : layers.stop + 1])
        sizes += partition(costs.tolist(), cells, "min_max")
    return sizes


def worker_totals(times: Sequence[LayerTimes], config: PipelineConfig, placement: Sequence[int]) -> list[Totals]:
    """Returns for each worker the running total over the layers of what they would cost it in a step."""
    keep = kept_graphs(config.policy, config.K, config.M)
    lists = schedule(config.schedule, placement, config.M, keep)
    phases = passes(lists)
    cells = Counter(placement)
    seconds = {phase: np.array([getattr(each, phase) for each in times]) for phase in asdict(times[0])}
    totals = []
    for worker in range(len(lists)):
        own = sum((phases[cell] for cell, of in enumerate(placement) if of == worker), Counter())
        slower = cells[worker] * (config.speeds[worker] if config.speeds else 1.0)
        step = sum(number / slower * seconds[phase] for phase, number in own.items())
        totals.append(np.concatenate([[0.0], np.cumsum(step)]))
    return totals


def passes(lists: InstructionLists) -> dict[int, Counter[str]]:
    """Returns for each cell how often a step runs each phase of `LayerTimes`."""
    recomputed = {(i.cell, i.micro_batch) for each in lists for i in each if i.op is Op.RECOMPUTE}
    found: dict[int, Counter[str]] = {}
    for instruction in (i for each in lists for i in each if i.op in COMPUTE):
        again = (instruction.cell, instruction.micro_batch) in recomputed
        phase = "inference" if instruction.op is Op.FORWARD and again else instruction.op.name.lower()
        found.setdefault(instruction.cell, Counter())[phase] += 1
    return found
