"""From the configuration's names to objects: the one place where ``_target_`` is instantiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from hydra.utils import instantiate
from torch import nn

from ..config import PipelineConfig, PrecisionConfig
from ..data.source import Source
from ..distributed.world import World
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost, layer_costs
from ..partition.fake_layers import CostError, TooFewExamples
from ..partition.partition import PartitionError, cell_costs, cell_layers, partition, placement
from ..partition.sharing import Sharing, find_sharing
from ..pipeline.cell import BuiltLayer, Cell, build_layer
from ..pipeline.randomness import NoiseSource
from ..tasks.base import Task
from .checked_task import CheckedTask
from .target_errors import explain


def build_model(section: Mapping[str, Any]) -> list[LayerBuilder]:
    """Calls ``model._target_`` with the section's other keys and returns its layers.

    Raises:
        ConfigurationError: it failed, or did not return a list of `LayerBuilder`s with distinct names.
    """
    model = _instantiate("model", section)
    if not isinstance(model, Sequence) or not model or not all(isinstance(layer, LayerBuilder) for layer in model):
        raise ConfigurationError(
            f"model._target_={section['_target_']} must return a non-empty list of gpipe_cli.layers.LayerBuilder, "
            f"not {_describe(model)}"
        )
    names = [layer.name for layer in model]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"model._target_={section['_target_']} has two layers named {twice!r}: rename one")
    return list(model)


def build_source(section: Mapping[str, Any]) -> Source:
    """``data._target_``: where mini-batches come from."""
    return cast(Source, _with_methods("data", section, ("train", "evaluation")))


def build_task(section: Mapping[str, Any]) -> Task:
    """``task._target_``: loss and metrics."""
    task = _with_methods("task", section, ("weight", "loss", "evaluate", "summarize"))
    return cast(Task, CheckedTask(cast(Task, task), section["_target_"]))


def build_optimizer(section: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """``optimizer._target_`` over this worker's parameters; a cell without any gets one that does nothing.

    The key ``decay_only`` is ours: with ``matrices``, ``weight_decay`` holds for parameters of two or more dimensions
    (weights of convolutions and linear maps, embeddings) and is 0 for the others (biases, norms). The optimizer then
    has two groups on every worker, one of them perhaps empty, so that the schedule's state fits any partition.

    Raises:
        ConfigurationError: a wrong ``decay_only``, keys that the optimizer does not take, or an optimizer that wants
            more than gradients: a loss that it can compute again, or sparse ones.
    """
    own = {key: value for key, value in section.items() if key != "decay_only"}
    held = list(parameters) or [nn.Parameter(torch.zeros(1))]
    optimizer = cast(torch.optim.Optimizer, _instantiate("optimizer", own, _groups(section, held)))
    closure = signature(optimizer.step).parameters.get("closure")
    if (closure is not None and closure.default is closure.empty) or isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"optimizer._target_={section['_target_']} wants to compute the loss again in its step, or sparse "
            "gradients: a pipeline has computed ordinary gradients once for each update; use another, as optimizer=adam"
        )
    return optimizer


def _groups(section: Mapping[str, Any], parameters: list[nn.Parameter]) -> list[Any]:
    kind = section.get("decay_only")
    if kind is None:
        return parameters
    if kind != "matrices":
        raise ConfigurationError(f"optimizer.decay_only={kind}: use matrices, or null to decay every parameter")
    if "weight_decay" not in section:
        raise ConfigurationError(f"optimizer.decay_only={kind} without optimizer.weight_decay: give both, or neither")
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2]},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def build_lr_schedule(
    section: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """``lr_schedule._target_``: the learning rate over the steps.

    Raises:
        ConfigurationError: it is no schedule, does not take its keys, or wants to know more than steps.
    """
    made = _with_methods("lr_schedule", section, ("step", "get_last_lr", "state_dict", "load_state_dict"), optimizer)
    schedule = cast(torch.optim.lr_scheduler.LRScheduler, made)
    wanted = [name for name, given in signature(schedule.step).parameters.items() if given.default is given.empty]
    if wanted:
        raise ConfigurationError(
            f"lr_schedule._target_={section['_target_']} wants {wanted[0]} at every step, but a schedule learns here "
            "only that a step has passed: use one that counts steps, as lr_schedule=cosine, and trainer.patience to "
            "end a run that no longer gets better"
        )
    return schedule


def build_autocast(precision: PrecisionConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which forward runs: bf16 autocast or nothing.

    Without autocast's cache: it keeps the casts of leaves, and a cell's inputs are leaves where they would be inner
    tensors of a larger cell. What is used twice would then add up its gradients in bf16 here and in fp32 there.
    """
    if precision.autocast is None:
        return nullcontext
    dtype = getattr(torch, precision.autocast)
    return lambda: torch.autocast(device.type, dtype, cache_enabled=False)


def _instantiate(key: str, section: Mapping[str, Any], *arguments: object) -> Any:
    try:
        return instantiate(dict(section), *arguments, _convert_="all")
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(explain(key, section, error)) from error


def _with_methods(key: str, section: Mapping[str, Any], methods: Sequence[str], *arguments: object) -> object:
    made = _instantiate(key, section, *arguments)
    missing = [name for name in methods if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigurationError(f"{key}._target_={section['_target_']} has no method {', '.join(missing)}")
    return cast(object, made)


def _describe(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        odd = next((item for item in value if not isinstance(item, LayerBuilder)), None)
        return "an empty list" if odd is None else f"a list with {type(odd).__name__} in it"
    return type(value).__name__


@dataclass(frozen=True)
class Cut:
    """How the model is cut into cells and put on workers, and what is known of every cell.

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
        return cell_layers(self.sizes)


def cut_model(
    builders: Sequence[LayerBuilder],
    config: PipelineConfig,
    workers: int,
    example: MicroBatch,
    profile: Callable[[], list[LayerCost]] | None = None,
) -> Cut:
    """Costs, partition and placement (paper, section 2.2), from one micro-batch's shapes.

    Args:
        profile: gives the costs with `pipeline.cost=profile`; None: they are measured, and forgotten.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, or weights shared across a cut.
    """
    refuse_more_cells_than_layers(len(builders), config)  # before costs are counted
    try:
        if config.cost == "profile" and profile is not None:
            costs = profile()
        else:
            costs = layer_costs(builders, example[0], config.cost)
    except TooFewExamples as error:
        raise ConfigurationError(error.with_way_out(config.M)) from error
    except (PartitionError, CostError) as error:
        raise ConfigurationError(str(error)) from error
    return cut_by_costs(builders, costs, config, workers, find_sharing(builders))


def refuse_more_cells_than_layers(layers: int, config: PipelineConfig) -> None:
    """What `partition` will refuse whatever the costs are, as soon as the number of layers is known.

    Raises:
        ConfigurationError: more cells than layers, or sizes that do not add up to them.
    """
    try:
        partition([1.0] * layers, config.K, config.partition)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error


def cut_by_costs(
    builders: Sequence[LayerBuilder],
    costs: Sequence[LayerCost],
    config: PipelineConfig,
    workers: int,
    sharing: Sharing,
) -> Cut:
    """Partition and placement from known costs.

    Raises:
        ConfigurationError: more cells than layers, sizes that do not add up, more workers than cells, or weights shared
            across a cut.
    """
    try:
        sizes = partition([layer.cost for layer in costs], config.K, config.partition)
        totals = cell_costs([layer.cost for layer in costs], sizes)
        workers_of = placement(config.schedule, totals, workers)
    except PartitionError as error:
        raise ConfigurationError(str(error)) from error
    cells = cell_layers(sizes)
    _refuse_sharing_across_cells(sharing, {builders[i].name: cell for cell, layers in enumerate(cells) for i in layers})
    again = [sum(repeated.values()) for repeated in sharing.repeated]
    parameters = [cost.parameters - repeated for cost, repeated in zip(costs, again, strict=True)]
    whole = sum(totals) or 1.0
    table = [
        {
            "cell": number,
            "worker": workers_of[number],
            "first": builders[layers[0]].name,
            "last": builders[layers[-1]].name,
            "layers": len(layers),
            "parameters": sum(parameters[i] for i in layers),
            "cost": totals[number],
            "share": totals[number] / whole,
        }
        for number, layers in enumerate(cells)
    ]
    return Cut(list(sizes), tuple(workers_of), table, sum(parameters))


def _refuse_sharing_across_cells(sharing: Sharing, cell_of: Mapping[str, int]) -> None:
    """Weights that two layers share must lie in one cell; ``cell_of``: by the layer's name."""
    for shared in sharing.pairs:
        if cell_of[shared.layers[0]] != cell_of[shared.layers[1]]:
            raise ConfigurationError(
                f"layers {shared.layers[0]!r} and {shared.layers[1]!r} share the weight {shared.parameters[0]!r} but "
                "lie in different cells, where each would train its own copy: untie them, or choose "
                "pipeline.partition sizes that put both in one cell"
            )


def build_cells(
    builders: Sequence[LayerBuilder], cut: Cut, world: World, seed: int, sync_batchnorm: bool
) -> list[Cell]:
    """This worker's cells, and only those, on its device."""
    noise = NoiseSource(seed, world.replica, world.device)
    group = world.replica_group if sync_batchnorm else None
    cells = []
    for number, layers in enumerate(cut.layers):
        if cut.placement[number] == world.worker:
            built = [BuiltLayer(i, builders[i].name, build_layer(builders[i], i, seed, world.device)) for i in layers]
            cells.append(Cell(number, built, noise, group))
    return cells
