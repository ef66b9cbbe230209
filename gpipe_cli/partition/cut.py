"""Cuts the model into cells and places them on workers (paper, section 2.2).

With `partition=auto` by the seconds that workers spend in a step, with what the schedule makes them recompute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..config import PipelineConfig
from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..micro_batch import MicroBatch
from ..pipeline.tied_parameters import Use
from ..schedule.instruction import COMPUTE, Instruction, InstructionLists, Op
from ..schedule.orders import ROUND_ROBIN
from ..schedule.schedule import kept_graphs, schedule
from ..schedule.simulate import simulate
from .balance import Bytes, NothingFits, Totals, balance, balance_rounds
from .cost import LayerCost, LayerTimes, keep_shapes_that_depend_on_values_together, layer_costs, total_times
from .fake_layers import CostError
from .partition import (
    cell_costs,
    cell_layers,
    partition,
    placement,
    refuse_more_workers_than_cells,
    round_robin,
)
from .shorten import shortened
from .tie_search import Ties, find_ties

MOST_SIMULATED = 30_000  # instructions for one cut, a tenth of a second; larger steps are only balanced


@dataclass(frozen=True)
class Cut:
    """Describes the model's cells and the worker of each.

    Attributes:
        sizes: layers of each cell.
        placement: worker of each cell.
        table: one row a cell: cell, worker, layers (first, last, count), parameters, cost, share of what all
            cells do in a step.
        parameters: of the whole model.
        ties: for every layer, its parameters that an earlier layer owns: `Ties.owners`.
        varying: layers behind which no cut may lie, because what they pass on has shapes that depend on values.
    """

    sizes: list[int]
    placement: tuple[int, ...]
    table: list[dict[str, Any]]
    parameters: int
    ties: list[dict[str, Owner]]
    varying: list[int] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cut:
        """Reads what JSON has made of `dataclasses.asdict`."""
        ties = [{name: Owner(*owner) for name, owner in tied.items()} for tied in values["ties"]]
        return cls(**{**values, "placement": tuple(values["placement"]), "ties": ties})

    @property
    def layers(self) -> list[range]:
        """Returns the indices of each cell's layers."""
        return cell_layers(self.sizes)

    def uses(self, names: Sequence[str]) -> list[list[Use]]:
        """Returns the uses of every tied parameter, in layer order; ``names``: of the model's layers."""
        worker = [self.placement[cell] for cell, layers in enumerate(self.layers) for _ in layers]
        found: dict[Owner, list[Use]] = {}
        for index, tied in enumerate(self.ties):
            for own, owner in tied.items():
                first = Use(str(owner), worker[names.index(owner.layer)])
                found.setdefault(owner, [first]).append(Use(f"{names[index]}.{own}", worker[index]))
        return list(found.values())


def cut_model(
    builders: Sequence[LayerBuilder],
    config: PipelineConfig,
    workers: int,
    example: MicroBatch,
    profile: Callable[[], list[LayerCost]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    fitted: Callable[[Sequence[LayerCost], Ties], Cut] | None = None,
) -> Cut:
    """Computes costs, partition and placement.

    Args:
        example: a micro-batch; only its shapes matter.
        profile: returns the costs for `pipeline.cost=profile`; None: that is refused.
        say: receives a line about places without a cut.
        fitted: makes the cut of known costs; None: whatever the memory of the workers.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or a declared tie that cannot be.
    """
    refuse_more_cells_than_layers(len(builders), config)  # before costs are counted
    if config.cost == "profile" and profile is not None:
        try:
            costs = profile()
        except (CostError, torch.OutOfMemoryError) as error:  # a layer cannot be timed by itself
            say(f"cut by FLOPs, because layers could not be timed: {error}")
            costs = layer_costs(builders, example[0], "flops")
    else:
        costs = layer_costs(builders, example[0], config.cost)
    if config.cost != "flops":
        costs = keep_shapes_that_depend_on_values_together(costs, builders, example[0])
    for line in places_without_cut(costs):
        say(line)
    ties = find_ties(builders)
    return cut_by_costs(builders, costs, config, workers, ties) if fitted is None else fitted(costs, ties)


def places_without_cut(costs: Sequence[LayerCost]) -> list[str]:
    """Returns a line about the layers behind which no cut may lie; none where there are none."""
    joined = [cost.name for cost in costs[:-1] if not cost.may_end_cell]
    some = ", ".join(joined[:3]) + (f" and {len(joined) - 3} more layers" if len(joined) > 3 else "")
    return [f"no cut behind {some}: the shape of what is returned there depends on values"] if joined else []


def refuse_more_cells_than_layers(layers: int, config: PipelineConfig) -> None:
    """Raises ConfigurationError for a `K` or `partition` that does not fit the number of layers, whatever they cost."""
    sizes = "min_variance" if config.partition == "auto" else config.partition
    partition([1.0] * layers, config.K, sizes)


def cut_by_costs(
    builders: Sequence[LayerBuilder],
    costs: Sequence[LayerCost],
    config: PipelineConfig,
    workers: int,
    ties: Ties,
    bytes_: Bytes | None = None,
    room: Sequence[float] = (),
) -> Cut:
    """Computes partition and placement from the layers' costs.

    Args:
        bytes_, room: as in `cut_by_time`; where nothing fits, the cut is made as if everything did.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or more workers than cells.
    """
    if config.devices and len(config.devices) != workers:
        raise ConfigurationError(
            f"pipeline.devices describes {len(config.devices)} devices but a replica has {workers} workers: describe "
            "one device for each"
        )
    times = [layer.times for layer in costs]
    inseparable = {number: layer.name for number, layer in enumerate(costs[:-1]) if not layer.may_end_cell}
    if config.partition == "auto":
        try:
            sizes, worker_of = cut_by_time(times, config, workers, inseparable, bytes_, room)
        except NothingFits:
            sizes, worker_of = cut_by_time(times, config, workers, inseparable)
    else:
        sizes = partition([layer.cost for layer in costs], config.K, config.partition, inseparable)
        worker_of = placement(config.schedule, cell_costs([layer.cost for layer in costs], sizes), workers)
    seconds = worker_totals(times, config, worker_of)
    cells = cell_layers(sizes)
    parameters = [cost.parameters - repeated for cost, repeated in zip(costs, ties.repeated, strict=True)]
    busy = [float(seconds[of][own.stop] - seconds[of][own.start]) for of, own in zip(worker_of, cells, strict=True)]
    totals, whole = cell_costs([layer.cost for layer in costs], sizes), sum(busy) or 1.0
    table = [
        {
            "cell": cell,
            "worker": worker_of[cell],
            "first": builders[layers[0]].name,
            "last": builders[layers[-1]].name,
            "layers": len(layers),
            "parameters": sum(parameters[i] for i in layers),
            "cost": totals[cell],
            "share": busy[cell] / whole,
        }
        for cell, layers in enumerate(cells)
    ]
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters), ties.owners, list(inseparable))


def cut_by_time(
    times: Sequence[LayerTimes],
    config: PipelineConfig,
    workers: int,
    inseparable: Mapping[int, str],
    bytes_: Bytes | None = None,
    room: Sequence[float] = (),
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the layers of each cell, and the worker of each cell, of which a step takes the least seconds.

    Workers are balanced; where all fits, layers then move while the simulated step becomes shorter.

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
        parts, least = balance_rounds(totals, config.K, known, room), [1] * config.K
    else:
        least = [*Counter(placement).values()]
        parts = balance(totals, least, known, room)

    def layers_of(parts: Sequence[int]) -> list[int]:
        groups = parts if config.schedule in ROUND_ROBIN else _cells_inside(parts, totals, placement)
        return [ends[group.stop] - ends[group.start] for group in cell_layers(groups)]

    if bytes_ is None and workers > 1:
        lists = _lists(config, placement)

        def seconds(parts: Sequence[int]) -> float:
            return step_seconds(times, layers_of(parts), placement, config.speeds, lists)

        parts = shortened(parts, least, seconds, MOST_SIMULATED // sum(map(len, lists)))
    return layers_of(parts), placement


def _lists(config: PipelineConfig, placement: Sequence[int]) -> InstructionLists:
    return schedule(config.schedule, placement, config.M, kept_graphs(config.policy, config.K, config.M))


def step_seconds(
    times: Sequence[LayerTimes],
    sizes: Sequence[int],
    placement: Sequence[int],
    speeds: Sequence[float] | None,
    lists: InstructionLists,
) -> float:
    """Returns the seconds of one step by simulation, messages free, in the unit of ``times``."""
    cells = [
        total_times(times[layers.start : layers.stop]).slower(1 / speeds[worker] if speeds else 1.0)
        for layers, worker in zip(cell_layers(sizes), placement, strict=True)
    ]
    return simulate(lists, placement, durations(cells, lists)).span


def durations(times: Sequence[LayerTimes], lists: InstructionLists) -> Callable[[Instruction], float]:
    """Returns the function that `simulate` calls for the seconds of each computation; ``times``: of each cell."""
    phase = phases(lists)

    def seconds(instruction: Instruction) -> float:
        name = phase(instruction)
        return 0.0 if name is None else float(getattr(times[instruction.cell], name))

    return seconds


def even_placement(kind: str, K: int, workers: int) -> tuple[int, ...]:
    """Returns the worker of each of K cells before they are cut: as many cells on each, the later ones one more."""
    if kind in ROUND_ROBIN:
        return round_robin(K, workers)
    refuse_more_workers_than_cells(K, workers)
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
    lists = _lists(config, placement)
    counts = passes(lists)
    cells = Counter(placement)
    seconds = {phase: np.array([getattr(each, phase) for each in times]) for phase in asdict(times[0])}
    totals = []
    for worker in range(len(lists)):
        own = sum((counts[cell] for cell, of in enumerate(placement) if of == worker), Counter())
        slower = cells[worker] * (config.speeds[worker] if config.speeds else 1.0)
        step = sum(number / slower * seconds[phase] for phase, number in own.items())
        totals.append(np.concatenate([[0.0], np.cumsum(step)]))
    return totals


def passes(lists: InstructionLists) -> dict[int, Counter[str]]:
    """Returns for each cell how often a step runs each phase of `LayerTimes`."""
    phase, found = phases(lists), dict[int, Counter[str]]()
    for instruction in (i for each in lists for i in each if i.op in COMPUTE):
        if (name := phase(instruction)) is not None:
            found.setdefault(instruction.cell, Counter())[name] += 1
    return found


def phases(lists: InstructionLists) -> Callable[[Instruction], str | None]:
    """Returns the function that names the phase of `LayerTimes` that a computation in ``lists`` is.

    No worker waits for a gradient of cell 0's inputs: the first half of its backward is all of it, the second None.
    """
    recomputed = {(i.cell, i.micro_batch) for each in lists for i in each if i.op is Op.RECOMPUTE}

    def phase(i: Instruction) -> str | None:
        if i.cell == 0 and i.op in (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT):
            return "backward" if i.op is Op.INPUT_GRADIENT else None
        without_graph = i.op is Op.FORWARD and (i.cell, i.micro_batch) in recomputed
        return "inference" if without_graph else i.op.name.lower()

    return phase
