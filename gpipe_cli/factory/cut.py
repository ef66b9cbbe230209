"""Cuts the model into cells, places them on workers and builds those of this worker (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import PipelineConfig, Settings
from ..distributed.world import World
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost, keep_shapes_that_depend_on_values_together, layer_costs
from ..partition.fake_layers import CostError, TooFewExamples
from ..partition.partition import PartitionError, cell_costs, cell_layers, partition, placement
from ..partition.ties import Ties, find_ties
from ..pipeline.cell import BuiltLayer, Cell, build_layer
from ..pipeline.randomness import NoiseSource
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
    """

    sizes: list[int]
    placement: tuple[int, ...]
    table: list[dict[str, Any]]
    parameters: int

    @property
    def layers(self) -> list[range]:
        """Returns the indices of each cell's layers."""
        return cell_layers(self.sizes)


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
        ConfigurationError: more cells than layers, sizes that do not add up, or weights shared across a cut.
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
        ConfigurationError: more cells than layers, sizes that do not add up, more workers than cells, or weights shared
            across a cut.
    """
    try:
        inseparable = {number: layer.name for number, layer in enumerate(costs[:-1]) if not layer.may_end_cell}
        sizes = partition([layer.cost for layer in costs], config.K, config.partition, inseparable)
        totals = cell_costs([layer.cost for layer in costs], sizes)
        worker_of = placement(config.schedule, totals, workers)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error
    cells = cell_layers(sizes)
    _refuse_ties_across_cells(builders, ties, cells)
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
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters))


def _refuse_ties_across_cells(builders: Sequence[LayerBuilder], ties: Ties, cells: Sequence[range]) -> None:
    names = [builder.name for builder in builders]
    cell_of = {f"{names[i]}.": cell for cell, layers in enumerate(cells) for i in layers}
    for index, tied in enumerate(ties.owners):
        for owner in tied.values():
            layer = max((name for name in cell_of if owner.startswith(name)), key=len)
            if cell_of[layer] != cell_of[f"{names[index]}."]:
                raise ConfigurationError(
                    f"layers {layer[:-1]!r} and {names[index]!r} share the weight {owner[len(layer) :]!r} but "
                    "lie in different cells, where each would train its own copy: untie them, or choose "
                    "pipeline.partition sizes that put both in one cell"
                )


def build_cells(
    builders: Sequence[LayerBuilder], cut: Cut, world: World, settings: Settings, where: Position
) -> list[Cell]:
    """Builds this worker's cells on its device, and no others.

    Args:
        where: shown with an error.
    """
    seed, boundary_type = settings.seed, boundary_type_of(settings.precision)

    def build(index: int) -> BuiltLayer:
        where.layer = builders[index].name
        module = build_layer(builders[index], index, seed, world.device)
        return BuiltLayer(index, builders[index].name, module, boundary_type if index < len(builders) - 1 else None)

    noise = NoiseSource(seed, world.replica, world.device)
    group = world.replica_group if settings.pipeline.sync_batchnorm else None
    cells = []
    for cell, layers in enumerate(cut.layers):
        if cut.placement[cell] == world.worker:
            where.enter(cell, None, "building")
            cells.append(Cell(cell, [build(index) for index in layers], noise, group))
    where.enter(None, None, None)
    return cells
