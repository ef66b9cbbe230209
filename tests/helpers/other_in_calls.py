"""Defines modules whose later calls, or calls with other examples, a trace of one call would not repeat."""

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unusual_modules import WIDTH, Perceptron


@dataclass(slots=True)
class Counter:
    """Counts calls, without a __dict__."""

    calls: int = 0


class Warm(Perceptron):
    """Begins with a block after some calls; the count is in an object with slots."""

    def add_parts(self) -> None:
        self.counter = Counter()

    def count(self) -> int:
        self.counter.calls += self.training
        return self.counter.calls

    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h) if self.count() > 6 else h


class WarmsLong(Warm):
    """Begins after more calls than any comparison makes."""

    def changed(self, h: Tensor) -> Tensor:
        return Perceptron.changed(self, h) if self.count() > 10**4 else h


class TogglesMode(Perceptron):
    """Leaves what its forward has set until the mode changes."""

    def changed(self, h: Tensor) -> Tensor:
        h = F.dropout(super().changed(h), training=self.second.training)
        self.second.eval()
        return h


class Alternates(Warm):
    def add_parts(self) -> None:
        self.turns = itertools.cycle((1, 9))

    def count(self) -> int:
        return next(self.turns)


class CountsEvaluations(Warm):
    def count(self) -> int:
        self.counter.calls += 3 * (not self.training)
        return self.counter.calls


class DrawsTable(Perceptron):
    table: Tensor | None = None

    def changed(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.randn(WIDTH, WIDTH)
        return super().changed(h) @ self.table


class DropsByItself(Perceptron):
    """Leaves a block out by a generator of its own, too rarely to be seen in a few calls."""

    def add_parts(self) -> None:
        self.random = random.Random(3)

    def changed(self, h: Tensor) -> Tensor:
        return h if self.training and self.random.random() < 1e-4 else super().changed(h)


class DrawsOutsideTracing(Perceptron):
    """Draws from a generator of its own where nothing traces."""

    def add_parts(self) -> None:
        self.generator = torch.Generator()

    def changed(self, h: Tensor) -> Tensor:
        own = None if torch.compiler.is_compiling() else self.generator
        return super().changed(h) * torch.rand(WIDTH, generator=own)


class Strides(Perceptron):
    """Reads a boundary's memory by its strides, which the layer in front has turned round."""

    def add_parts(self) -> None:
        self.first, self.second = Turned(3, WIDTH), Reading(WIDTH, WIDTH)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class Reading(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.as_strided(h.shape, h.stride()))


class OneAlone(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h - h.mean(0) if h.shape[0] > 1 else h)
