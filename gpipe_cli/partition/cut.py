"""Cuts the model into cells and places them on workers (paper, section 2.2).

With `partition=auto` by the seconds that workers spend in a step, with what the schedule makes them recompute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import PipelineConfig
from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..micro_batch import MicroBatch
from ..pipeline.tied_parameters import Use
from .cost import LayerTimes, count_forward, layer_costs, with_loss
from .cutter import Cutter, Memory
from .fake_layers import CostError
from .model_profile import ModelProfile
from .partition import cell_layers, even_placement, partition
from .survey import Survey, survey


@dataclass(frozen=True)
class Cut:
    """Describes the model's cells and the worker of each.

    Attributes:
        sizes: layers of each cell.
        placement: worker of each cell.
        table: one row a cell: cell, worker, layers (first, last, count), parameters, share of all cells' seconds of a
            forward and backward.
        parameters: number of parameters of the whole model.
        ties: owners of the parameters that each layer shares with an earlier one, by name (`Survey.owners`).
        varying: layers behind which no cut may lie, because what they pass on has shapes that depend on values.
        flops: FLOPs of a forward of the micro-batch by which the model was cut; None where they are not counted.
    """

    sizes: list[int]
    placement: tuple[int, ...]
    table: list[dict[str, Any]]
    parameters: int
    ties: list[dict[str, Owner]]
    varying: list[int] = field(default_factory=list)
    flops: float | None = None

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
        """Returns the uses of every tied parameter, in layer order.

        Args:
            names: names of the model's layers.
        """
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
    fitted: Callable[[Sequence[LayerTimes]], Cut] | None = None,
) -> Cut:
    """Computes costs, partition and placement.

    Args:
        example: a micro-batch; only its shapes matter.
        profile: returns the times for `pipeline.cost=profile`; None: FLOPs count.
        say: receives a line about places without a cut.
        fitted: makes a cut that fits the workers' memory, from the layers' times; None: memory does not matter.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or a declared tie that cannot be.
    """
    found = survey(builders, example[0], count_forward)
    for line in places_without_cut(found):
        say(line)
    times, how = None, config.cost
    if how == "profile" and profile is not None:
        try:
            measured = profile()
            times = with_loss(measured.layers, measured.loss)
        except (CostError, torch.OutOfMemoryError) as error:  # a layer cannot be timed by itself
            say(f"cut by FLOPs, because layers could not be timed: {error}")
            how = "flops"
    if times is None:
        times = list(map(LayerTimes.of_cost, layer_costs(builders, found, how)))
    cut = cut_by_times(found, times, config, workers) if fitted is None else fitted(times)
    return cut if found.failure else replace(cut, flops=sum(layer.flops for layer in found.layers))


def places_without_cut(found: Survey[Any]) -> list[str]:
    """Returns one line that names the layers behind which no cut may lie; no line if there are none."""
    joined = [found.names[index] for index in found.joined]
    some = ", ".join(joined[:3]) + (f" and {len(joined) - 3} more layers" if len(joined) > 3 else "")
    return [f"no cut behind {some}: the shape of what is returned there depends on values"] if joined else []


def refuse_more_cells_than_layers(layers: int, config: PipelineConfig) -> None:
    """Raises ConfigurationError for a `K` or `partition` that does not fit the number of layers, whatever they cost."""
    sizes = "min_variance" if config.partition == "auto" else config.partition
    partition([1.0] * layers, config.K, sizes)


def cut_by_times(
    found: Survey[Any], times: Sequence[LayerTimes], config: PipelineConfig, workers: int, memory: Memory | None = None
) -> Cut:
    """Computes partition and placement from the layers' times, in any unit.

    Args:
        memory: bytes that the workers need and have; None: any cut fits.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or more workers than cells.
    """
    devices = config.worker_devices or ()
    if devices and len(devices) != workers:
        said = f"pipeline.worker_devices describes {len(devices)} devices but a replica has {workers} workers"
        raise ConfigurationError(f"{said}: describe one device for each")
    inseparable = {index: found.names[index] for index in found.joined}
    if config.partition == "auto":
        sizes = Cutter(times, config, workers, inseparable).sizes(memory)
    else:
        sizes = partition([each.total for each in times], config.K, config.partition, inseparable)
    worker_of, cells, parameters = even_placement(config, workers), cell_layers(sizes), found.sizes
    speeds = [config.speeds[worker] if config.speeds else 1.0 for worker in worker_of]
    busy = [sum(times[i].total for i in layers) / speed for layers, speed in zip(cells, speeds, strict=True)]
    whole = sum(busy) or 1.0
    table = [
        {
            "cell": cell,
            "worker": worker_of[cell],
            "first": found.names[layers[0]],
            "last": found.names[layers[-1]],
            "layers": len(layers),
            "parameters": sum(parameters[layers.start : layers.stop]),
            "share": busy[cell] / whole,
        }
        for cell, layers in enumerate(cells)
    ]
    return Cut(list(sizes), tuple(worker_of), table, sum(parameters), found.owners, found.joined)
