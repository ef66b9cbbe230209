"""Tests the comparison of a traced module's layers with the module itself: what differs is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import own_module
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from unusual_modules import WIDTH, Perceptron

from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.compare import TRAINED, Compared, compare
from gpipe_cli.models.traced.layers import layers


class Counts(Perceptron):
    calls = 0

    def changed(self, h: Tensor) -> Tensor:
        self.calls += 1
        return super().changed(h) * self.calls


class HidesWeight(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return F.gelu(F.linear(h, self.second.weight.detach(), self.second.bias))


class StaleWeight(Perceptron):
    """Keeps a copy of a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.second.weight.detach().clone()

    def changed(self, h: Tensor) -> Tensor:
        return F.gelu(F.linear(h, self.second.weight - self.second.weight.detach() + self.kept, self.second.bias))


class Freezes(Perceptron):
    def train(self, mode: bool = True) -> Perceptron:
        super().train(mode)
        self.first.weight.requires_grad_(False)
        return self


class Averaged(Perceptron):
    def __init__(self) -> None:
        super().__init__()
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


class Half(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float16)


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
    micro_batches: Sequence[MicroBatch] = [((make(3),), ()) for _ in range(2)]
    shape = list(micro_batches[0][0][0].shape)
    return compare(layers(made, [("float32", shape)], seed=3), micro_batches, squares)


@pytest.mark.parametrize(
    ("traced", "own", "kind", "name"),
    [
        (Perceptron, Counts, "output", "micro-batch 1"),
        (Perceptron, HidesWeight, "gradient", "second.weight"),
        (Perceptron, StaleWeight, "output after an update", "micro-batch 0"),
        (Perceptron, Freezes, TRAINED, "first.weight"),
        (Averaged, UpdatesAverage, "buffer", "average"),
        (Perceptron, OtherInEvaluation, "output in evaluation", "micro-batch 0"),
        (Perceptron, Half, "output", "micro-batch 0"),
    ],
)
def test_what_differs_from_the_module_itself_is_named(
    traced: type[nn.Module], own: type[nn.Module], kind: str, name: str
) -> None:
    found, _ = compared(traced, points, own)
    assert found.beyond[0].where == f"{kind} of {name}", found


@pytest.mark.parametrize("module", [own_module.mobile_net, own_module.Noisy])
def test_batchnorm_and_noise_are_the_modules_own(module: Callable[[], nn.Module]) -> None:
    found, _ = compared(module, images)
    assert found.compared and found.verdict == "bit for bit", found


def test_rounding_that_float64_does_not_have_is_none() -> None:
    """The sum of float32 in another order, of values that cancel."""

    class Cancels(Perceptron):
        def changed(self, h: Tensor) -> Tensor:
            return h + (super().changed(h) + 3000.0 - 3000.0)

    class CancelsLater(Perceptron):
        def changed(self, h: Tensor) -> Tensor:
            return (h + super().changed(h)) + 3000.0 - 3000.0

    found, decided = compared(Cancels, points, CancelsLater)
    assert not found.beyond and decided, found
