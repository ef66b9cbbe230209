"""Tests what a layer may return, and the refusal of one that changes its buffers, its input or a weight."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from inline_run import same_bits_at_every_k
from own_model import DIGITS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.buffers import BufferChanged, BufferGuard
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.messages.boundary import BoundarySpec, as_argument, as_tensors, grouping_of, replace_tensors
from gpipe_cli.pipeline.randomness import NoiseSource

ONE, TWO = torch.zeros(1), torch.arange(2)


class Pair(NamedTuple):
    left: Tensor
    right: Any


GROUPED = [(ONE, None), (ONE, (TWO, ONE)), {"x": ONE, "mask": TWO}, [ONE, {3: (TWO,)}, (), []]]
GROUPED += [({"x": {"tensor": ONE}}, "tensor", 7, 0.1, True, None)]


@pytest.mark.parametrize("value", GROUPED, ids=str)
def test_groups_of_tensors_arrive_as_they_were(value: object) -> None:
    tensors = as_tensors(value)
    spec = BoundarySpec.from_json(BoundarySpec.of(tensors).to_json())
    assert spec.grouping == grouping_of(tensors) and spec.fits(tensors)
    assert str(as_argument(tensors)) == str(value) == str(replace_tensors(value, torch.clone))


@pytest.mark.parametrize(
    ("value", "argument"),
    [((ONE,), ONE), ([ONE, TWO], (ONE, TWO)), (Pair(ONE, TWO), (ONE, TWO)), ((), ())],
    ids=["one alone", "a list", "a named tuple", "nothing"],
)
def test_plain_tuples_need_no_grouping(value: object, argument: object) -> None:
    tensors = as_tensors(value)
    assert type(tensors) is tuple and grouping_of(tensors) is None
    assert str(as_argument(tensors)) == str(argument)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "NoneType"),
        ((None, 3), "tuple"),
        ((ONE, [ONE, {1}]), "set"),
        ((ONE, Pair(ONE, None)), "Pair"),
        ({"x": OrderedDict(y=ONE)}, "OrderedDict"),
        ({"x": ONE, (0, 1): ONE}, "dict"),
    ],
    ids=str,
)
def test_what_a_layer_may_not_return_is_named(value: object, found: str) -> None:
    with pytest.raises(TypeError, match=f"a layer returns a tensor, or tensors in tuples, .* not {found}: return"):
        as_tensors(value)


class Rows(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).view(len(images), 8, 24) / 255


class LastState(nn.Module):
    """Takes what `nn.LSTM` returns."""

    def forward(self, returned: tuple[Tensor, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        outputs, (hidden, cell) = returned
        return {"x": outputs[:, -1] + hidden[-1] + cell[0], "none": None}


class Logits(nn.Linear):
    def forward(self, named: dict[str, Any]) -> Tensor:
        return super().forward(named["x"])


def recurrent() -> list[LayerBuilder]:
    """Returns a model with `nn.LSTM` as it is."""
    return [
        LayerBuilder("rows", Rows),
        LayerBuilder("lstm", partial(nn.LSTM, 24, 8, num_layers=2, dropout=0.2, batch_first=True)),
        LayerBuilder("last_state", LastState),
        LayerBuilder("logits", partial(Logits, 8, 10)),
    ]


def test_an_lstm_as_it_is_trains_with_the_same_bits_at_every_k(tmp_path: Path) -> None:
    """Without a graph oneDNN's LSTM gives other bits than with one, and K decides which layers have a graph."""
    words = (*DIGITS, "model._target_=test_layer_outputs.recurrent", "trainer.steps=3")
    assert same_bits_at_every_k(tmp_path, (1, 2, 4), *words)


# -- buffers ---------------------------------------------------------------------------------------------------------


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
def test_a_layer_that_changes_a_buffer_is_named(make: Callable[[], nn.Module], buffer: str, with_graph: bool) -> None:
    cell = cell_of(make())
    with pytest.raises(ConfigurationError) as error, torch.set_grad_enabled(with_graph):
        run(cell)
    assert f"layer 'the layer' changes its buffer {buffer!r}" in str(error.value)
    assert "nn.BatchNorm" in str(error.value)


def test_a_table_made_at_first_use_is_allowed_and_the_comparison_changes_no_bit() -> None:
    whole = Positions()
    whole.table = torch.arange(4.0)  # from the beginning
    late, ready = cell_of(Positions()), cell_of(whole)
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
