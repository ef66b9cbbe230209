"""Cuts the model into cells, places them on workers and builds those of this worker (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import PipelineConfig, Settings
from ..distributed.world import World
from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner, announce
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost, keep_shapes_that_depend_on_values_together, layer_costs
from ..partition.fake_layers import CostError, TooFewExamples
from ..partition.partition import PartitionError, cell_costs, cell_layers, partition, placement
from ..partition.tie_search import Ties, find_ties
from ..pipeline.cell import BuiltLayer, Cell, build_layer
from ..pipeline.randomness import NoiseSource
from ..pipeline.tied_parameters import Use
from ..position import Position
from .build import boundary_type_of


@dataclass(frozen=True)
class Cut:
    """Describes the model's cells and the worker of each.

    Attributes:
        sizes: layers of each cell.
        placement: worker of each cell.
        table: one row a cell: cell, worker, layers (first, last, count), parameters, cost, share of the whole cost.
        parameters: of the whole model.
        ties: for every layer, its parameters that an earlier layer owns: `Ties.owners`.
    """

    sizes: list[int]
    placement: tuple[int, ...]
    table: list[dict[str, Any]]
    parameters: int
    ties: list[dict[str, Owner]]

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
) -> Cut:
    """Computes costs, partition and placement.

    Args:
        example: a micro-batch; only its shapes matter.
        profile: returns the costs for `pipeline.cost=profile`; None: they are measured now and not kept.
        say: receives one line about layers that were counted on random values, and one about places without a cut.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or a declared tie that cannot be.
    """
    refuse_more_cells_than_layers(len(builders), config)  # before costs are counted
    try:
        if config.cost == "profile" and profile is not None:
            costs = profile()
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
    return cut_by_costs(builders, costs, config, workers, find_ties(builders))


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
    try:
        partition([1.0] * layers, config.K, config.partition)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error


def cut_by_costs(
    builders: Sequence[LayerBuilder],
    costs: Sequence[LayerCost],
    config: PipelineConfig,
    workers: int,
    ties: Ties,
) -> Cut:
    """Computes partition and placement from the layers' costs.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or more workers than cells.
    """
    try:
        inseparable = {number: layer.name for number, layer in enumerate(costs[:-1]) if not layer.may_end_cell}
        sizes = partition([layer.cost for layer in costs], config.K, config.partition, inseparable)
        totals = cell_costs([layer.cost for layer in costs], sizes)
        worker_of = placement(config.schedule, totals, workers)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error
    cells = cell_layers(sizes)
    parameters = [cost.parameters - repeated for cost, repeated in zip(costs, ties.repeated, strict=True)]
    whole = sum(totals) or 1.0
    table = [
        {
            "cell": cell,
            "worker": worker_of[cell],
            "first": builders[layers[0]].name,
            "last": builders[layers[-1]].name,
            "layers": len(layers),
            "parameters": sum(parameters[i] for i in layers),
            "cost": totals[cell],
            "share": totals[cell] / whole,
        }
        for cell, layers in enumerate(cells)
    ]
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters), ties.owners)


def build_cells(
    builders: Sequence[LayerBuilder], cut: Cut, world: World, settings: Settings, where: Position
) -> list[Cell]:
    """Builds this worker's cells on its device, and no others.

    Args:
        where: shown with an error.
    """
    seed, boundary_type = settings.seed, boundary_type_of(settings.precision)

    held: set[int] = set()

    def build(index: int) -> BuiltLayer:
        where.layer = builders[index].name
        module = _own(build_layer(builders[index], index, seed, world.device), held)
        passed = boundary_type if index < len(builders) - 1 else None
        return BuiltLayer(index, builders[index].name, module, passed, _with_all_names(cut.ties[index], module))

    noise = NoiseSource(seed, world.replica, world.device)
    group = world.replica_group if settings.pipeline.sync_batchnorm else None
    own = {cell: layers for cell, layers in enumerate(cut.layers) if cut.placement[cell] == world.worker}
    announce(builders[index] for layers in own.values() for index in layers)
    cells = []
    for cell, layers in own.items():
        where.enter(cell, None, "building")
        cells.append(Cell(cell, [build(index) for index in layers], noise, group, settings.pipeline.compile))
    where.enter(None, None, None)
    return cells


def _own(module: nn.Module, held: set[int]) -> nn.Module:
    """Returns the module, or a copy where an earlier layer holds something of it: every use has gradients of its own.

    So a BatchNorm in a module that several layers share has statistics for each of them.

    Args:
        held: ids of the tensors of earlier layers; gets those of this one.
    """
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if tensors & held:
        module = deepcopy(module)
        tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held |= tensors
    return module


def _with_all_names(tied: Mapping[str, Owner], module: nn.Module) -> dict[str, Owner]:
    """Returns the owner of each tied parameter under all names that it has in its layer."""
    named = dict(module.named_parameters(remove_duplicate=False))
    owners = {id(named[name]): owner for name, owner in tied.items()}
    return {name: owners[id(parameter)] for name, parameter in named.items() if id(parameter) in owners}
