"""Builds the cells of this worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn

from ..config import PipelineConfig
from ..layers import LayerBuilder, Owner, announce
from ..partition.cut import Cut
from ..pipeline.cell import BuiltLayer, Cell, build_layer
from ..pipeline.randomness import NoiseSource
from ..position import Position
from .world import World


def build_own_cells(
    builders: Sequence[LayerBuilder],
    cut: Cut,
    world: World,
    config: PipelineConfig,
    seed: int,
    boundary_type: torch.dtype | None,
    where: Position,
) -> list[Cell]:
    """Builds this worker's cells on its device, and no others.

    Args:
        boundary_type: of floating-point tensors between two layers; None: as a layer returns them.
        where: shown with an error.
    """
    held: set[int] = set()

    def build(index: int) -> BuiltLayer:
        where.layer = builders[index].name
        module = _own(build_layer(builders[index], index, seed, world.device), held)
        passed = boundary_type if index < len(builders) - 1 else None
        tied, may_vary = _with_all_names(cut.ties[index], module), index in (*cut.varying, len(builders) - 1)
        return BuiltLayer(index, builders[index].name, module, passed, tied, may_vary)

    noise = NoiseSource(seed, world.replica, world.device)
    group = world.replica_group if config.sync_batchnorm else None
    own = {cell: layers for cell, layers in enumerate(cut.layers) if cut.placement[cell] == world.worker}
    announce(builders[index] for layers in own.values() for index in layers)
    cells = []
    for cell, layers in own.items():
        where.enter(cell, None, "building")
        cells.append(Cell(cell, [build(index) for index in layers], noise, group, config.compile))
    where.leave()
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
