"""Defines the small model, data and task on which the faults are planted: they show every sort of fault in seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.data.source import Batch, Source
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.tasks.base import Task

VOCABULARY, WIDTH = 11, 8
Boundary = tuple[Tensor, ...]  # x [b, t, d], mask [b, t], ids [b, t], positions [b, t]

# -- model -----------------------------------------------------------------------------------------------------------


class WordTable(nn.Module):
    """Maps ids [b, t] to (x [b, t, d], mask [b, t] bool, ids, positions [b, t] float without gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Boundary:
        x = self.table(ids)
        return x, ids == 0, ids, torch.arange(ids.shape[1], dtype=x.dtype).expand(ids.shape[0], -1)


class Residual(nn.Module):
    """Adds a branch with dropout that uses all tensors of the boundary."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, inputs: Boundary) -> Boundary:
        x, mask, ids, positions = inputs
        branch = torch.tanh(self.linear(x) + 0.1 * positions[..., None])
        return x + self.dropout(branch).masked_fill(mask[..., None], 0.0), mask, ids, positions


class Normalised(nn.Module):
    """Normalises the channels; its output is a transposed view, with unusual strides on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Boundary) -> Boundary:
        return self.norm(inputs[0].transpose(1, 2)).transpose(1, 2), *inputs[1:]


class Auxiliary(nn.Module):
    """Passes everything on and adds an auxiliary loss in the middle of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.opinion = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Boundary) -> Boundary:
        return inputs

    def auxiliary_loss(self, outputs: Boundary, targets: Boundary) -> Tensor:
        """Returns 0.4 times the cross-entropy of a second classifier."""
        return 0.4 * F.cross_entropy(self.opinion(outputs[0]).flatten(0, 1), targets[0].flatten(), reduction="sum")


class WordClassifier(nn.Module):
    """Maps x to the logits of every word."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Boundary) -> Tensor:
        return self.out(inputs[0])  # type: ignore[no-any-return]


# -- layers that do what a layer should not, or only sometimes does ----------------------------------------------------


class Counting(Residual):
    """Changes a buffer of its own in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Boundary) -> Boundary:
        self.calls += 1
        return super().forward(inputs)


class Dice(Residual):
    """Draws random numbers that are not torch's."""

    def forward(self, inputs: Boundary) -> Boundary:
        x, *rest = super().forward(inputs)
        return x * (1 + random.random()), *rest


class Slow(Residual):
    """Takes so long that a kill can hit each part of a step."""

    def forward(self, inputs: Boundary) -> Boundary:
        time.sleep(0.01)
        return super().forward(inputs)


ODD = {
    "counter": Counting,
    "dice": Dice,
    "slow": partial(Slow, 0.2),
}


def layers(
    batchnorm: bool = True,
    dropout: float = 0.2,
    odd: str = "",
    auxiliary: bool = True,
    tied: str = "",
) -> list[LayerBuilder]:
    """Returns embed, mix_0, norm (or mix_1), judge, mix_2, mix_3 (or the ``odd`` layer), head.

    Args:
        tied: "declared": judge and head use the matrix of embed; "shared": by modules that they share.
    """
    mix = partial(Residual, dropout)
    made: dict[str, Any] = {"embed": WordTable, "mix_0": mix}
    made |= {"norm": Normalised} if batchnorm else {"mix_1": mix}
    made |= {"judge": Auxiliary} if auxiliary else {}
    made |= {"mix_2": mix, odd or "mix_3": ODD.get(odd, mix), "head": WordClassifier}
    if tied == "shared":
        judge, embed, head = Auxiliary(), WordTable(), WordClassifier()
        judge.opinion.weight = head.out.weight = embed.table.weight
        made |= {"judge": lambda: judge, "embed": lambda: embed, "head": lambda: head}
    owner = "embed.table.weight"
    ties = {"judge": {"opinion.weight": owner}, "head": {"out.weight": owner}} if tied == "declared" else {}
    return [LayerBuilder(name, build, tied=ties.get(name, {})) for name, build in made.items()]


# -- data and task -----------------------------------------------------------------------------------------------------


def micro_batches(number: int, examples: int, parts: int) -> list[MicroBatch]:
    """Returns ``examples`` rows in ``parts`` of nearly equal size; mini-batches differ in width."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (examples, 5 + number % 2), generator=generator)
    return [((rows,), (rows.roll(1, 1),)) for rows in ids.tensor_split(parts)]


class RandomRows(Source):
    """Yields rows of random ids, whose targets are the ids one place further."""

    def __init__(self, batch_size: int = 16) -> None:
        self.batch_size = batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches from ``position`` on."""
        for number in range(position or 0, 1000):
            everything = micro_batches(number, self.batch_size, M * replicas)
            yield Batch(everything[replica * M : (replica + 1) * M], number + 1)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields two mini-batches."""
        for number in (1001, 1002):
            yield Batch(micro_batches(number, self.batch_size, M), 1)


class NextWord(Task):
    """Computes the cross-entropy of the words that are not padding."""

    statistics = ("right", "tokens")
    metrics = ("nll",)
    unit = "tokens"

    def weight(self, targets: Boundary) -> float:
        """Returns the number of words that are not padding."""
        return float((targets[0] != 0).sum())

    def loss(self, outputs: Boundary, targets: Boundary) -> tuple[Tensor, Tensor]:
        """Returns (sum over the words, [words that are right, words])."""
        (logits,), (wanted,) = outputs, targets
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
        right = ((logits.argmax(-1) == wanted) & (wanted != 0)).sum()
        return loss, torch.stack((right, (wanted != 0).sum())).double()


_HERE = "benchmarks.reliability.planted_faults.subject"
WORDS = (
    *(f"model._target_={_HERE}.layers", f"data._target_={_HERE}.RandomRows", f"task._target_={_HERE}.NextWord"),
    *("data.batch_size=16", "pipeline.K=4", "pipeline.M=4", "trainer.steps=1000"),
    *("optimizer=adam", "lr_schedule=constant", "optimizer.lr=0.01", "trainer.gradient_clip=0.05"),
)  # with `PARTITION`: cell 0: embed, mix_0; cell 1: norm, judge; cell 2: mix_2, mix_3; cell 3: head
PARTITION = "pipeline.partition=[2,2,2,1]"
