"""Defines a small model, and data and words of a job with it, in which every sort of fault shows in seconds."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.data.source import Batch, Source
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch

WORDS, WIDTH = 11, 8


class Embed(nn.Module):
    """Maps ids [b, t] to (x [b, t, d], mask [b, t] bool, ids, positions [b, t] float without gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.table(ids)
        positions = torch.arange(ids.shape[1], dtype=x.dtype, device=ids.device)
        return x, ids == 0, ids, positions.expand(len(ids), -1)


class Mix(nn.Module):
    """Adds a residual branch that uses all tensors of the boundary, in either of their groupings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        if len(others) == 2:
            named, (positions, nothing) = others
            assert nothing is None and list(named) == ["mask", 7]
            mask = named["mask"]
        else:
            mask, _, positions = others
        branch = torch.tanh(self.linear(x) + 0.1 * positions[..., None])
        return x + self.dropout(branch).masked_fill(mask[..., None], 0.0), *others


class Norm(nn.Module):
    """Normalises the channels; its output is a transposed view, with unusual strides on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.norm(inputs[0].transpose(1, 2)).transpose(1, 2), *inputs[1:]


class Judge(nn.Module):
    """Passes everything on, in another grouping, and adds an auxiliary loss in the middle of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.opinion = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        x, mask, ids, positions = inputs
        return x, {"mask": mask, 7: ids}, [positions, None]

    def auxiliary_loss(self, outputs: tuple[Any, ...], targets: tuple[Tensor, ...]) -> Tensor:
        return 0.4 * F.cross_entropy(self.opinion(outputs[0]).flatten(0, 1), targets[0].flatten(), reduction="sum")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.out(inputs[0])


def small_model(batchnorm: bool = False, dropout: float = 0.0) -> list[LayerBuilder]:
    """Returns seven layers with every sort of tensor that may pass a boundary."""
    mix = partial(Mix, dropout)
    first: dict[str, Any] = {"embed": Embed, "mix_0": mix, **({"norm": Norm} if batchnorm else {"mix_1": mix})}
    layers = {**first, "judge": Judge, "mix_2": mix, "mix_3": mix, "head": Head}
    return [LayerBuilder(name, build) for name, build in layers.items()]


def mini_batch(step: int, examples: int, M: int) -> list[MicroBatch]:
    """Returns ``examples`` rows in M micro-batches of nearly equal size; their width changes from step to step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (examples, 5 + step % 2), generator=generator)
    return [((rows,), (rows.roll(1, 1),)) for rows in ids.tensor_split(M)]


class Counting(Mix):
    """Changes a buffer of its own in every forward."""

    calls: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        return super().forward(inputs)


class Dice(Mix):
    """Draws random numbers that are not torch's."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = super().forward(inputs)
        return x * (1 + random.random()), *rest


class Slow(Mix):
    """Takes so long that a kill can hit each part of a step."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        time.sleep(0.01)
        return super().forward(inputs)


ODD = {"counter": Counting, "dice": Dice, "slow": Slow}


def layers(batchnorm: bool = True, odd: str = "", auxiliary: bool = True, tied: str = "") -> list[LayerBuilder]:
    """Returns embed, mix_0, norm (or mix_1), judge, mix_2, mix_3 (or the ``odd`` layer), head.

    Args:
        tied: "declared": judge and head use the matrix of embed; "shared": by modules that they share.
    """
    made = {builder.name: builder for builder in small_model(batchnorm, 0.2) if auxiliary or builder.name != "judge"}
    if odd:
        made["mix_3"] = LayerBuilder(odd, partial(ODD[odd], 0.2))
    uses = {"judge": "opinion", "head": "out"} if tied else {}
    if tied == "shared":
        modules: dict[str, Any] = {name: made[name].build() for name in ("embed", *uses)}
        for name, own in uses.items():
            getattr(modules[name], own).weight = modules["embed"].table.weight
        made |= {name: replace(made[name], build=partial(modules.__getitem__, name)) for name in modules}
    elif tied:
        made |= {name: replace(made[name], tied={f"{own}.weight": "embed.table.weight"}) for name, own in uses.items()}
    return [*made.values()]


class RandomRows(Source):
    """Yields rows of random ids, whose targets are the ids one place further; mini-batches differ in width."""

    def __init__(self, batch_size: int = 16) -> None:
        self.batch_size = batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        for number in range(position or 0, 1000):
            rows = mini_batch(number, self.batch_size, M * replicas)
            yield Batch(rows[replica * M : (replica + 1) * M], number + 1)

    def evaluation(self, M: int) -> Iterator[Batch]:
        return (Batch(mini_batch(number, self.batch_size, M), 1) for number in (1001, 1002))


SUBJECT = (  # cell 0: embed, mix_0; cell 1: norm, judge; cell 2: mix_2, mix_3; cell 3: head
    *(f"model._target_={__name__}.layers", f"data._target_={__name__}.RandomRows"),
    *("task=language_model", "task.pad_id=0", "task.logit_clip=0.5"),
    *("data.batch_size=16", "pipeline.K=4", "pipeline.M=4", "pipeline.partition=[2,2,2,1]", "trainer.steps=1000"),
    *("optimizer=adam", "lr_schedule=constant", "optimizer.lr=0.01", "trainer.gradient_clip=0.05"),
)
