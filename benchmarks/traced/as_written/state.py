"""Defines modules that keep or change something between two calls: buffers, statistics, caches, counters."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.traced.as_written.given import WIDTH, given, images, series, vectors
from benchmarks.traced.as_written.weights import Net


@given(series)
class RecurrentMemory(nn.Module):
    """Keeps its activations for the next call, as Transformer-XL does with segments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.inner(x))
        if self.memory is not None:
            h = h + self.outer(self.memory)
        self.memory = h.detach()
        return self.head(h.mean(1))


@given(vectors)
class CountsCalls(Net):
    """Anneals a temperature by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, h: Tensor) -> Any:
        self.calls += 1
        return F.gelu(self.body(h) / (1 + 0.5 * self.calls))


@given(vectors)
class AssignsBuffer(Net):
    """Replaces a buffer by its moving average and centres by it."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def middle(self, h: Tensor) -> Any:
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        return F.gelu(self.body(h - self.centre))


@given(vectors)
class UpdatesView(Net):
    """Updates one row of a buffer through a view of it."""

    statistics: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.zeros(2, WIDTH))

    def middle(self, h: Tensor) -> Any:
        with torch.no_grad():
            self.statistics[0].mul_(0.9).add_(h.mean(0), alpha=0.1)
        return F.gelu(self.body(h - self.statistics[0]))


@given(vectors)
class MomentumEncoder(Net):
    """Keeps a target network that follows the online one, updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.body).requires_grad_(False)

    def middle(self, h: Tensor) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.body.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            aim = self.target(h)
        return self.body(h) - aim


@given(series)
class PositionsAtFirstCall(nn.Module):
    """Makes a table of positions when it is first called, and again for longer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            at = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
            self.table = torch.sin(at[:, None] / 10 ** torch.arange(WIDTH, device=x.device))
        return self.head(torch.tanh(self.outer(torch.tanh(self.inner(x + self.table[: x.shape[1]])))).mean(1))


class RunningMean:
    """Keeps a moving average, in an object that is no module."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, value: Tensor) -> Tensor:
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        return self.mean


@given(vectors)
class StateInHelper(Net):
    """Divides by a moving average that a helper keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = RunningMean()

    def middle(self, h: Tensor) -> Any:
        return self.body(h) / self.tracker(h.detach().norm())


@given(vectors)
class CountsInClass(Net):
    """Counts calls in its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).calls = 0

    def middle(self, h: Tensor) -> Any:
        type(self).calls += 1
        return self.body(h) / type(self).calls


@given(vectors)
class AlternatesByIterator(Net):
    """Takes one of two layers in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([self.body, self.last])

    def middle(self, h: Tensor) -> Any:
        return next(self.turns)(h).tanh()


@given(vectors)
class ChangesPlainTensor(Net):
    """Changes a tensor in place that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = torch.ones(WIDTH)

    def middle(self, h: Tensor) -> Any:
        self.anchor.mul_(0.5)
        return self.body(h + self.anchor)


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Stacks two convolutions with BatchNorm; those below change how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.head = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.bn1(self.first(x)))
        return self.head(F.relu(self.bn2(self.second(h)) + h).mean((2, 3)))


@given(images)
class FrozenBatchNorm(ConvNet):
    """Keeps a BatchNorm in evaluation mode by an overridden train()."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(mode)
        self.bn1.eval()
        return self


@given(images)
class CumulativeBatchNorm(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, momentum=0.5, eps=1e-3)


@given(images)
class BatchNormTwice(ConvNet):
    """Normalises twice by one BatchNorm."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.bn1(self.first(x)))
        return self.head(F.relu(self.bn1(self.second(h)) + h).mean((2, 3)))


@given(images)
class FunctionalBatchNorm(ConvNet):
    """Calls F.batch_norm with statistics of its own."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        h = F.batch_norm(h, self.mean, self.variance, self.gain, None, training=self.training, momentum=0.2)
        return self.head(F.relu(self.bn2(self.second(h)) + h).mean((2, 3)))
