"""Cuts the model into cells and places them on workers (paper, section 2.2).

With `partition=auto` by the seconds that workers spend in a step, with what the schedule makes them recompute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import PipelineConfig
from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..micro_batch import MicroBatch
from ..pipeline.tied_parameters import Use
from .cost import LayerCost, keep_shapes_that_depend_on_values_together, layer_costs
from .cutter import Cutter, Memory, worker_totals
from .fake_layers import CostError
from .model_profile import ModelProfile
from .partition import cell_layers, even_placement, partition
from .tie_search import Ties, find_ties


@dataclass(frozen=True)
class Cut:
    """Describes the model's cells and the worker of each.

    Attributes:
        sizes: layers of each cell.
        placement: worker of each cell.
        table: one row a cell: cell, worker, layers (first, last, count), parameters, share of what all cells do in a
            step.
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
    def from_json(cls, values: Mapping[str, Any]) -> "Cut":
        """Reads a cut from the JSON of its `dataclasses.asdict`."""
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
    profile: Callable[[], ModelProfile] | None = None,
    say: Callable[[str], None] = lambda line: None,
    fitted: Callable[[Sequence[LayerCost], Ties], Cut] | None = None,
) -> Cut:
    """Computes costs, partition and placement.

    Args:
        example: a micro-batch; only its shapes matter.
        profile: returns the times for `pipeline.cost=profile`; None: that is refused.
        say: receives a line about places without a cut.
        fitted: makes the cut of known costs; None: whatever the memory of the workers.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or a declared tie that cannot be.
    """
    refuse_more_cells_than_layers(len(builders), config)  # before costs are counted
    if config.cost == "profile" and profile is not None:
        try:
            costs = profile().costs
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
    memory_of: Callable[[tuple[int, ...]], Memory] | None = None,
) -> Cut:
    """Computes partition and placement from the layers' costs.

    Args:
        memory_of: returns what a placement needs of the workers' memory; None: any cut fits.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or more workers than cells.
    """
    if config.devices and len(config.devices) != workers:
        said = f"pipeline.devices describes {len(config.devices)} devices but a replica has {workers} workers"
        raise ConfigurationError(f"{said}: describe one device for each")
    times = [layer.times for layer in costs]
    inseparable = {number: layer.name for number, layer in enumerate(costs[:-1]) if not layer.may_end_cell}
    if config.partition == "auto":
        cutter = Cutter(times, config, workers, inseparable)
        worker_of = cutter.placement
        sizes = cutter.sizes(None if memory_of is None else memory_of(worker_of))
    else:
        sizes = partition([layer.cost for layer in costs], config.K, config.partition, inseparable)
        worker_of = even_placement(config, workers)
    seconds = worker_totals(times, config, worker_of)
    cells = cell_layers(sizes)
    parameters = [sum(form.numel for _, form, _ in own) for own in ties.own]
    busy = [float(seconds[of][own.stop] - seconds[of][own.start]) for of, own in zip(worker_of, cells, strict=True)]
    whole = sum(busy) or 1.0
    table = [
        {
            "cell": cell,
            "worker": worker_of[cell],
            "first": builders[layers[0]].name,
            "last": builders[layers[-1]].name,
            "layers": len(layers),
            "parameters": sum(parameters[i] for i in layers),
            "share": busy[cell] / whole,
        }
        for cell, layers in enumerate(cells)
    ]
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters), ties.owners, list(inseparable))
