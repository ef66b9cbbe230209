"""Tests the comparison of a traced module's layers with the module itself: what differs is found and named."""

import random
from collections.abc import Callable

import own_module
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from unusual_modules import WIDTH, Masked, Perceptron, ReplacesBuffer

from gpipe_cli.comparison.module_itself import Compared, Given, compare, itself
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.models.traced.layers import TracedLayer, layers, traced_layers
from gpipe_cli.models.traced.module import Call, TracedFrom
from gpipe_cli.models.traced.trace import SizeError


class DrawsInPython(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return self.second(h) if random.random() < 0.5 else h


class CountsCalls(Perceptron):
    calls = 0

    def changed(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.second(h) / self.calls


class MergesInEvaluation(Perceptron):
    def train(self, mode: bool = True) -> "MergesInEvaluation":
        self.second.weight.data += -1 if mode else 1
        return super().train(mode)


class TogglesMode(Perceptron):
    """Leaves what its forward has set until the mode changes."""

    def changed(self, h: Tensor) -> Tensor:
        h = F.dropout(super().changed(h), training=self.second.training)
        self.second.eval()
        return h


class DrawsTable(Perceptron):
    table: Tensor | None = None

    def changed(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.randn(WIDTH, WIDTH)
        return super().changed(h) @ self.table


class Padded(Masked):
    """Counts padding in a mean, on which torch's encoder puts zeros in evaluation alone."""

    def changed(self, h: Tensor) -> Tensor:
        texts, padding = torch.stack([h, -h, h * h], 1), torch.arange(3).expand(h.shape[0], 3) > 1
        return self.second(self.encoder(texts, src_key_padding_mask=padding).mean(1))


class OneAlone(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h - h.mean(0) if h.shape[0] > 1 else h)


class OneToken(nn.Module):
    """Has another way for texts of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.head(self.table(ids))
        return h.mean(1) if ids.shape[1] > 1 else h.sin()[:, 0]


class AttendsBefore(Perceptron):
    """Masks by the smallest number of the type, as attention is often written."""

    def changed(self, h: Tensor) -> Tensor:
        dots = self.second(h) @ self.third.weight
        mask = torch.ones(WIDTH, dtype=torch.bool).cumsum(0) > 2
        return dots.masked_fill(mask, -torch.finfo(dots.dtype).max).softmax(1).to(h.dtype) * 9


class AsksForType(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        h = super().changed(h)
        return h if h.dtype == torch.float32 else 3 * h


class TiedHalf(Perceptron):
    """Is all bfloat16, with one matrix in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def add_parts(self) -> None:
        self.second.weight = self.third.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.head.weight.dtype))

    def changed(self, h: Tensor) -> Tensor:
        return super().changed(F.linear(h, self.third.weight))


class HidesWeight(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return F.gelu(F.linear(h, self.second.weight.detach(), self.second.bias))


class Averaged(Perceptron):
    def add_parts(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h) + 0 * self.average


class UpdatesAverage(Averaged):
    def changed(self, h: Tensor) -> Tensor:
        self.average[0] += 1
        return super().changed(h)


class OtherInEvaluation(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h) if self.training else h


def points(examples: int) -> Tensor:
    return torch.randn(examples, 3)


def images(examples: int) -> Tensor:
    return torch.randn(examples, 3, 32, 32)


def squares(outputs: Tensors, targets: Tensors) -> Tensor:
    return outputs[0].float().square().mean()


def compared(
    traced: Callable[[], nn.Module], make: Callable[[int], Tensor], own: Callable[[], nn.Module] | None = None
) -> Compared:
    """Compares the layers of ``traced`` with itself, or with another module that nothing has traced."""

    def made() -> nn.Module:
        return traced() if own is None or isinstance(torch.empty(0), FakeTensor) else own()

    torch.manual_seed(0)
    given = Given([((make(n),), ()) for n in (5, 3)], squares, torch.optim.AdamW)
    return compare(layers(made, [("float32", list(make(3).shape))], seed=3), given)


@pytest.mark.parametrize(
    ("traced", "own", "where"),
    [
        (Perceptron, HidesWeight, "call 1, training: gradient of second.weight"),
        (Averaged, UpdatesAverage, "call 1, training: buffer of average"),
        (Perceptron, OtherInEvaluation, "call 3, evaluation: output"),
    ],
)
def test_what_differs_from_the_module_is_named(traced: type[nn.Module], own: type[nn.Module], where: str) -> None:
    found = compared(traced, points, own).found
    assert found.beyond[0].where == where, found


LOST = [CountsCalls, DrawsInPython, DrawsTable, MergesInEvaluation, Padded, ReplacesBuffer, TogglesMode]


@pytest.mark.parametrize("module", LOST)
def test_what_a_trace_of_one_call_would_lose_is_found(module: type[nn.Module]) -> None:
    assert compared(module, points).found.beyond


def test_a_module_that_does_something_else_with_one_example_or_token_needs_two() -> None:
    assert [compared(module, points).fewest for module in (Perceptron, OneAlone)] == [1, 2]
    texts = [((torch.randint(9, (n, 5)),), ()) for n in (4, 2)]
    made = layers(OneToken, [("int64", [4, 5])], seed=3)
    found = compare(made, Given(texts, squares, torch.optim.AdamW))
    assert not found.found.beyond and (found.fewest, found.shortest) == (1, 2)
    first = made[0].build()
    assert isinstance(first, TracedLayer)
    first.require(found.fewest, found.shortest)
    with pytest.raises(SizeError, match="with fewer the module itself does something else"):
        first(torch.ones(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("module", [AttendsBefore, AsksForType])
def test_a_module_is_traced_and_compared_in_the_run_s_precision(module: type[nn.Module]) -> None:
    given = Given([((points(n),), ()) for n in (5, 1)], squares, torch.optim.AdamW)
    found = compare(layers(module, [("float32", [3, 3])], seed=3, autocast="bfloat16"), given)
    assert found.found.relative == 0 and found.found.compared > 80, found
    precisions = ("bfloat16", None)
    whole, other = (
        itself(TracedFrom(module, Call(), 3, of), given).call(False, given.micro_batches[0]) for of in precisions
    )
    assert not torch.equal(whole.float(), other)


def test_a_tied_table_in_bfloat16_differs_by_rounding_alone() -> None:
    as_it_is = TracedFrom(TiedHalf, Call(), 3)
    given = Given([((points(n),), ()) for n in (5, 3)], squares, torch.optim.AdamW)
    found = compare(traced_layers(as_it_is, [("float32", [5, 3])]), given).found
    assert not found.beyond, found


def counted() -> nn.Module:
    module = own_module.mobile_net()
    module.register_forward_hook(lambda own, *_: setattr(own, "calls", getattr(own, "calls", 0) + 1))
    return module


@pytest.mark.parametrize("module", [counted, own_module.Noisy])
def test_batchnorm_and_noise_are_the_modules_own(module: Callable[[], nn.Module]) -> None:
    found = compared(module, images).found
    assert found.compared > 100 and found.relative < 1e-6, found  # the sum of a tied weight's two uses


def test_rounding_is_no_difference() -> None:
    """The sum of float32 in another order, of values that cancel, and a gradient that is zero but for rounding."""

    class Cancels(Perceptron):
        def changed(self, h: Tensor) -> Tensor:
            return h + (super().changed(h) + 3000.0 - 3000.0)

    class CancelsLater(Perceptron):
        def changed(self, h: Tensor) -> Tensor:
            return (h + super().changed(h)) + 3000.0 - 3000.0

    class Shifts(Perceptron):
        """Adds what softmax does not see to all."""

        def add_parts(self) -> None:
            self.shift = nn.Parameter(torch.zeros(()))

        def changed(self, h: Tensor) -> Tensor:
            return super().changed((h + self.shift).softmax(1))

    class ShiftsInOtherOrder(Shifts):
        def changed(self, h: Tensor) -> Tensor:
            return Perceptron.changed(self, (h + self.shift).flip(1).softmax(1).flip(1))

    for traced, own in ((Shifts, ShiftsInOtherOrder), (Cancels, CancelsLater)):
        found = compared(traced, points, own).found
        assert not found.beyond, found
