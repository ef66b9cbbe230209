"""Tests modules that several builders return: each layer has parameters and statistics of its own."""

from __future__ import annotations

from torch import nn

from gpipe_cli.factory.cut import _own


def test_the_second_layer_of_a_shared_module_has_a_copy_of_it_whatever_it_holds() -> None:
    for shared in (nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3))):
        held: set[int] = set()
        first, fresh, second, third = (_own(module, held) for module in (shared, nn.Linear(3, 3), shared, shared))
        assert first is shared
        tensors = [tensor for layer in (first, fresh, second, third) for tensor in layer.state_dict().values()]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_shared_module_without_tensors_is_not_copied() -> None:
    held: set[int] = set()
    shared = nn.ReLU()
    assert _own(shared, held) is _own(shared, held)


def test_a_copy_keeps_the_ties_within_its_layer() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    held: set[int] = set()
    _own(shared, held)
    copy = _own(shared, held)
    assert copy[1].weight is copy[0].weight is not shared[0].weight
