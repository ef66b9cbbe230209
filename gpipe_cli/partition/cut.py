"""Cuts the model into cells and places them on workers (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import PipelineConfig
from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..micro_batch import MicroBatch
from ..pipeline.tied_parameters import Use
from .balance import Bytes, NothingFits
from .by_time import cut_by_time, worker_totals
from .cost import LayerCost, keep_shapes_that_depend_on_values_together, layer_costs
from .fake_layers import CostError, TooFewExamples
from .partition import PartitionError, cell_costs, cell_layers, partition, placement
from .tie_search import Ties, find_ties


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
    """

    sizes: list[int]
    placement: tuple[int, ...]
    table: list[dict[str, Any]]
    parameters: int
    ties: list[dict[str, Owner]]

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
        say: receives one line about layers that were counted on random values, and one about places without a cut.
        fitted: makes the cut of known costs; None: whatever the memory of the workers.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or a declared tie that cannot be.
    """
    refuse_more_cells_than_layers(len(builders), config)  # before costs are counted
    try:
        if config.cost == "profile" and profile is not None:
            costs = _timed(profile, builders, example, say)
        else:
            costs = layer_costs(builders, example[0], config.cost)
        if config.cost != "flops" and config.K > 1:
            costs = keep_shapes_that_depend_on_values_together(costs, builders, example[0])
    except TooFewExamples as error:
        raise ConfigurationError(error.with_way_out(config.M)) from error
    except (PartitionError, CostError) as error:
        raise ConfigurationError(str(error)) from error
    for line in notes_on_values(costs):
        say(line)
    ties = find_ties(builders)
    return cut_by_costs(builders, costs, config, workers, ties) if fitted is None else fitted(costs, ties)


def _timed(
    profile: Callable[[], list[LayerCost]],
    builders: Sequence[LayerBuilder],
    example: MicroBatch,
    say: Callable[[str], None],
) -> list[LayerCost]:
    """Returns the costs of a profile, or by FLOPs, with a line about it, where a layer cannot be timed by itself."""
    try:
        return profile()
    except (CostError, torch.OutOfMemoryError) as error:
        say(f"cut by FLOPs, because layers could not be timed: {error}")
        return layer_costs(builders, example[0], "flops")


def notes_on_values(costs: Sequence[LayerCost]) -> list[str]:
    """Returns a line about the layers whose costs were counted on random values, and one about places without a cut."""
    counted = [cost.name for cost in costs if cost.by_values]
    joined = [cost.name for cost in costs[:-1] if not cost.may_end_cell]
    lines = []
    if counted:
        lines.append(f"operations depend on values in {_some(counted)}: their FLOPs are those for random values")
    if joined:
        lines.append(f"no cut behind {_some(joined)}: the shape of what is returned there depends on values")
    return lines


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more layers" if len(names) > 3 else "")


def refuse_more_cells_than_layers(layers: int, config: PipelineConfig) -> None:
    """Raises ConfigurationError for a `K` or `partition` that does not fit the number of layers, whatever they cost."""
    sizes = "min_variance" if config.partition == "auto" else config.partition
    try:
        partition([1.0] * layers, config.K, sizes)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error


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
    try:
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
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error
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
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters), ties.owners)
