"""Tests that a layer that changes its buffers, its input or a weight in a training forward is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.pipeline.buffers import BufferChanged, BufferGuard
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.randomness import NoiseSource

INPUTS = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))


class Counter(nn.Module):
    """Counts its calls; `anew` replaces the buffer by another tensor."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.anew:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x


class OwnBatchNorm(nn.Module):
    """Calls the kernel itself, so that it is not recognised as a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


class Positions(nn.Module):
    """Makes its table at first use, and a larger one when needed; NaN stands for values that are never read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.full((1,), torch.nan), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < x.shape[-1]:
            self.table = torch.cat([torch.arange(x.shape[-1]), torch.tensor([torch.nan])])
        return F.dropout(self.norm(x) + self.table[: x.shape[-1]], 0.5, self.training)

    def auxiliary_loss(self, outputs: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.dropout(self.norm(outputs), 0.5).sum()


class Constant(nn.Module):
    """Computes the same, with the table from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(4.0))

    forward = Positions.forward
    auxiliary_loss = Positions.auxiliary_loss


def cell_of(layer: nn.Module) -> Cell:
    cell = Cell(0, [BuiltLayer(0, "the layer", layer)], NoiseSource(1, 0, torch.device("cpu")))
    cell.train(True)
    cell.guard_buffers()
    return cell


def run(cell: Cell) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    return cell.run_training((INPUTS,), (), 0, 0, "shape", True)


@pytest.mark.parametrize("with_graph", [True, False])
@pytest.mark.parametrize(
    ("make", "buffer"),
    [
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "running_mean"),
        (lambda: nn.Sequential(nn.ReLU(), spectral_norm(nn.Linear(4, 6))), "1.weight_u"),
        (lambda: parametrized_spectral_norm(nn.Linear(4, 6)), "parametrizations.weight.0._u"),
        (lambda: Counter(anew=False), "calls"),
        (lambda: Counter(anew=True), "calls"),
        (OwnBatchNorm, "mean"),
    ],
    ids=["InstanceNorm", "spectral_norm", "parametrized", "counter", "another tensor", "own BatchNorm"],
)
def test_a_layer_that_changes_its_buffers_is_refused_by_name(
    make: Callable[[], nn.Module], buffer: str, with_graph: bool
) -> None:
    cell = cell_of(make())
    with pytest.raises(ConfigurationError) as error, torch.set_grad_enabled(with_graph):
        run(cell)
    assert f"layer 'the layer' changes its buffer {buffer!r}" in str(error.value)
    assert "nn.BatchNorm" in str(error.value)


def test_a_table_made_at_first_use_is_allowed_and_the_comparison_changes_no_bit() -> None:
    late, ready = cell_of(Positions()), cell_of(Constant())
    for _ in range(2):
        (one,), losses = run(late)
        (other,), expected = run(ready)
        assert torch.equal(one, other) and torch.equal(losses[0], expected[0])
    gathered = [torch.stack(cell.batchnorms[0].take_gathered()) for cell in (late, ready)]
    assert len(gathered[0]) == 4 and torch.equal(*gathered)


def guarded(layer: nn.Module, name: str) -> BufferGuard:
    return BufferGuard(name, layer, layer)


@pytest.mark.parametrize("starts_cell", [True, False], ids=["at a cell's start", "inside a cell"])
def test_a_change_in_place_has_one_answer(starts_cell: bool) -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    given: torch.Tensor = leaf if starts_cell else leaf * 2
    with pytest.raises(BufferChanged, match=r"layer 'relu' changes its input in place.*inplace=False"):
        guarded(nn.ReLU(inplace=True), "relu")(given)


def test_a_layer_may_change_what_it_has_made_itself() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    assert guarded(layer, "layer")(torch.randn(2, 3, requires_grad=True)).shape == (2, 3)


def test_a_layer_that_changes_a_weight_is_refused_by_name() -> None:
    """Replicas that see other examples would train different weights, without a word until the next resume."""
    with pytest.raises(BufferChanged, match="layer 'words' changes its parameter 'weight' in forward"):
        guarded(nn.Embedding(8, 4, max_norm=0.1), "words")(torch.arange(8))
