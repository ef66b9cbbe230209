"""Tests modules that several builders return: each layer has parameters and statistics of its own."""

import torch
from composed import checked
from torch import nn

from gpipe_cli.distributed.pipeline import build_cells
from gpipe_cli.distributed.world import World
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cut import Cut
from gpipe_cli.position import Position

CPU = torch.device("cpu")


def built(*modules: nn.Module) -> list[nn.Module]:
    """Returns the layers of a cell whose builders return these modules."""
    builders = [LayerBuilder(f"layer_{n}", lambda module=module: module) for n, module in enumerate(modules)]
    cut = Cut([len(modules)], (0,), [], 0, [{} for _ in modules])
    world = World(0, 1, 1, CPU, CPU, None, None, None)
    (cell,) = build_cells(builders, cut, world, checked().settings.pipeline, 0, None, Position())
    return [layer.module for layer in cell.layers]


def test_the_second_layer_of_a_shared_module_has_a_copy_of_it_whatever_it_holds() -> None:
    for shared in (nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3))):
        layers = built(shared, nn.Linear(3, 3), shared, shared)
        tensors = [tensor for layer in layers for tensor in layer.state_dict().values()]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) > 4


def test_a_copy_keeps_the_ties_within_its_layer() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    first, second = built(shared, shared)
    assert second.get_parameter("1.weight") is second.get_parameter("0.weight")
    assert second.get_parameter("0.weight") is not first.get_parameter("0.weight")
