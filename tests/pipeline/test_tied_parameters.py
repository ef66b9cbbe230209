"""Tests tied parameters between workers: sums in layer order, and the owner's value, in any order of arrival."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.tied_parameters import ReplicaLink, TiedParameters, Use

CPU = torch.device("cpu")
# Three parameters, tied thrice, twice (owned by the last worker but one) and within a worker.
TIES = [("a.x", "b.x", "c.x", "e.x"), ("b.y", "d.y"), ("c.z", "d.z")]
LAYERS = {"a": "x", "b": "xy", "c": "xz", "d": "yz", "e": "x"}


class InMemory(ReplicaLink):
    """Sends through queues; a send waits until it is received, as a process group's may."""

    queues: dict[tuple[int, int], tuple[Queue[Tensor], Queue[None]]]

    def send(self, tensor: Tensor, worker: int) -> None:
        there, back = self.queues[self.worker, worker]
        there.put(tensor.detach().clone())
        back.get(timeout=10)

    def receive(self, into: Tensor, worker: int) -> None:
        there, back = self.queues[worker, self.worker]
        into.copy_(there.get(timeout=10))
        back.put(None)


Side = tuple[TiedParameters, dict[str, nn.Parameter]]


def made(placement: Sequence[int]) -> list[Side]:
    """Returns every worker's side, and its parameters by full name; cell i has the i-th layer."""
    worker_of = dict(zip(LAYERS, placement, strict=True))
    queues: dict[tuple[int, int], tuple[Queue[Tensor], Queue[None]]] = defaultdict(lambda: (Queue(), Queue()))
    for pair in [(i, j) for i in placement for j in placement]:
        assert queues[pair]
    InMemory.queues = queues
    sides = []
    for worker in sorted(set(placement)):
        cells, own = [], {}
        for number, (layer, names) in enumerate(LAYERS.items()):
            if worker_of[layer] == worker:
                values = {name: nn.Parameter(torch.randn(1000, generator=drawn(layer + name))) for name in names}
                cells.append(
                    Cell(number, [BuiltLayer(number, layer, nn.ParameterDict(values))], NoiseSource(0, 0, CPU))
                )
                own |= {
                    f"{layer}.{name}": parameter for name, parameter in cells[-1].layers[0].module.named_parameters()
                }
        uses = [[Use(name, worker_of[name[0]]) for name in tie] for tie in TIES]
        sides.append((TiedParameters(uses, cells, InMemory(worker, range(5), None)), own))
    return sides


def drawn(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def on_all(sides: Sequence[Side], do: Callable[[TiedParameters], object]) -> None:
    with ThreadPoolExecutor(len(sides)) as pool:
        list(pool.map(lambda side: do(side[0]), sides))


PLACEMENTS = ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [0, 1, 0, 1, 0], [2, 1, 0, 1, 0])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_are_added_in_layer_order_and_only_the_owner_keeps_one(placement: list[int]) -> None:
    sides = made(placement)
    own = {name: parameter for _, parameters in sides for name, parameter in parameters.items()}
    for name, parameter in own.items():
        parameter.grad = torch.randn(1000, generator=drawn(name)) * 1e3
    own["c.x"].grad = None  # nothing used it
    expected = {}
    for owner, *others in TIES:
        total = own[owner].grad
        assert total is not None
        for name in others:
            gradient = own[name].grad
            total = total + (0 if gradient is None else gradient)
        expected[owner] = total
    on_all(sides, TiedParameters.add_gradients)
    found = {name: parameter.grad for name, parameter in own.items() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_use_gets_the_owners_value_and_a_worker_keeps_it_once(placement: list[int]) -> None:
    sides = made(placement)
    on_all(sides, TiedParameters.spread)
    own = {name: parameter for _, parameters in sides for name, parameter in parameters.items()}
    assert all(torch.equal(own[name], own[uses[0]]) for uses in TIES for name in uses)
    for _, parameters in sides:
        for uses in TIES:
            assert len({parameters[name].data_ptr() for name in uses if name in parameters}) <= 1
