"""Defines the batch plan: what every worker must know about a mini-batch before it begins.

The workers that read the data write it into the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from .exchange import Exchange


@dataclass(frozen=True)
class BatchShape:
    """Holds the number of dimensions of each input and each target of a micro-batch."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> BatchShape:
        inputs, targets = micro_batch
        return cls(tuple(t.dim() for t in inputs), tuple(t.dim() for t in targets))

    @property
    def sizes(self) -> int:
        """Returns how many integers the shapes and types of one micro-batch have together."""
        return sum(dimensions + 1 for side in (self.inputs, self.targets) for dimensions in side)


@dataclass(frozen=True)
class BatchPlan:
    """Describes one mini-batch over all replicas.

    Attributes:
        signatures: of this replica's micro-batches; equal when all shapes and types are. Empty: nothing to do here.
        total_weight: of the whole mini-batch, over all replicas.
        total_micro_batches: micro-batches of all replicas; 0: the data of all has ended.
        ended: whether a replica's data has ended. Training ends with the first, because a mini-batch needs all.
        examples: of the whole mini-batch.
        empty: numbers of this replica's micro-batches of weight 0, whose loss does not count.
    """

    signatures: tuple[tuple[object, ...], ...]
    total_weight: float
    total_micro_batches: int
    ended: bool
    examples: int
    empty: frozenset[int] = frozenset()


class BatchPlanCodec:
    """Writes batch plans into the exchange and reads them from it.

    Args:
        shape: of every micro-batch of the run.
        M: the most micro-batches that a mini-batch has in one replica.
        replica, replicas: index of this replica, and their number.
    """

    def __init__(self, shape: BatchShape, M: int, replica: int, replicas: int) -> None:
        self.M = M
        self._shape, self._replica, self._replicas = shape, replica, replicas

    def fields(self) -> dict[str, int]:
        """Returns the exchange's fields of a plan."""
        slots = self._replicas * self.M
        return {"plan_micro_batches": self._replicas, "plan_weights": slots, "plan_shapes": slots * self._shape.sizes}

    def write(self, exchange: Exchange, micro_batches: Sequence[MicroBatch], weights: Sequence[float]) -> None:
        """Writes this replica's next mini-batch.

        Raises:
            ValueError: a tensor has another number of dimensions than in the first mini-batch.
        """
        exchange.own["plan_micro_batches"][self._replica] = len(micro_batches)
        if not micro_batches:
            return
        shapes = [tuple(tuple(map(_shape_and_type, side)) for side in micro_batch) for micro_batch in micro_batches]
        sizes = {one: [size for side in one for shape in side for size in shape] for one in set(shapes)}
        for one in sizes:
            if (found := BatchShape(*(tuple(len(row) - 1 for row in side) for side in one))) != self._shape:
                raise ValueError(
                    f"the data changed its form: {found} after {self._shape}; all micro-batches "
                    "must have as many tensors, of as many dimensions, as the first"
                )
        for field, values in (("plan_weights", weights), ("plan_shapes", [sizes[one] for one in shapes])):
            rows = torch.tensor(values, dtype=torch.float64)
            exchange.own[field].view(self._replicas, self.M, *rows.shape[1:])[self._replica, : len(rows)] = rows

    def read(self, exchange: Exchange, kind: str) -> BatchPlan:
        """Returns the plan of the last exchange; ``kind`` (train, evaluate, …) becomes part of the signatures."""
        counts = [int(n) for n in exchange.total["plan_micro_batches"].tolist()]
        shapes = exchange.total["plan_shapes"].long().view(self._replicas, self.M, -1)  # zeros where nothing is used
        weights: list[float] = exchange.total["plan_weights"].tolist()
        own = shapes[self._replica, : counts[self._replica]].tolist()
        return BatchPlan(
            signatures=tuple((kind, *row) for row in own),
            total_weight=sum(weights),
            total_micro_batches=sum(counts),
            ended=not all(counts),
            examples=int(shapes[..., 0].sum()),
            empty=frozenset(number for number in range(len(own)) if not weights[self._replica * self.M + number]),
        )


def refuse_unlike_lengths(inputs: Tensors, targets: Tensors) -> None:
    """Raises ConfigurationError where the first dimensions, which count examples, are not the same."""
    sides = {"inputs": inputs, "targets": targets}
    lengths = {f"{side}[{i}]": [*tensor.shape[:1]] for side, own in sides.items() for i, tensor in enumerate(own)}
    if len({*map(tuple, lengths.values())}) > 1 or [] in lengths.values():
        found = ", ".join(f"{name} {length[0] if length else 'has none'}" for name, length in lengths.items())
        raise ConfigurationError(f"the first dimension counts examples, the same in all tensors, but it is: {found}")


_TYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


def _shape_and_type(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape, _TYPES.index(tensor.dtype))
