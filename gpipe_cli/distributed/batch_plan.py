"""The plan of a mini-batch: what all workers must know before it begins, written by those who read the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..micro_batch import MicroBatch
from .exchange import Exchange


@dataclass(frozen=True)
class BatchShape:
    """How a part is built: the number of dimensions of each input and of each target."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, part: MicroBatch) -> BatchShape:
        inputs, targets = part
        return cls(tuple(t.dim() for t in inputs), tuple(t.dim() for t in targets))

    @property
    def numbers(self) -> int:
        """How many integers describe the shapes of one part."""
        return sum(self.inputs) + sum(self.targets)


@dataclass(frozen=True)
class BatchPlan:
    """One mini-batch over all replicas.

    Attributes:
        signatures: of this replica's micro-batches; equal when all shapes are. Empty: nothing to do here.
        weights: of this replica's micro-batches.
        total_weight: of the whole mini-batch, over all replicas.
        total_micro_batches: micro-batches of all replicas; 0: the data of all has ended.
        ended: the replicas whose data has ended. In training the run ends with the first: a mini-batch is that of all.
        examples: of the whole mini-batch.
    """

    signatures: tuple[tuple[object, ...], ...]
    weights: tuple[float, ...]
    total_weight: float
    total_micro_batches: int
    ended: tuple[int, ...]
    examples: int


class BatchPlanCodec:
    """Writes plans into the exchange and reads them from it.

    Args:
        form: of every part of the run.
        micro_batches: the most micro-batches that a mini-batch has in one replica.
        replica, replicas: this one, and how many.
    """

    def __init__(self, form: BatchShape, micro_batches: int, replica: int, replicas: int) -> None:
        self._form, self._parts, self._replica, self._replicas = form, micro_batches, replica, replicas

    def fields(self) -> dict[str, int]:
        """The exchange's fields that this needs."""
        slots = self._replicas * self._parts
        return {"plan_micro_batches": self._replicas, "plan_weights": slots, "plan_shapes": slots * self._form.numbers}

    def write(self, exchange: Exchange, micro_batches: Sequence[MicroBatch], weights: Sequence[float]) -> None:
        """Announces this replica's next mini-batch.

        Raises:
            ValueError: its micro_batches are built differently from the first one's.
        """
        first = self._replica * self._parts
        exchange.mine["plan_micro_batches"][self._replica] = len(micro_batches)
        for number, (part, weight) in enumerate(zip(micro_batches, weights, strict=True), start=first):
            if BatchShape.of(part) != self._form:
                raise ValueError(
                    f"the data changed its form: {BatchShape.of(part)} after {self._form}; all micro_batches must agree"
                )
            exchange.mine["plan_weights"][number] = weight
            sizes = [size for tensors in part for tensor in tensors for size in tensor.shape]
            start = number * self._form.numbers
            for offset, size in enumerate(sizes):
                exchange.mine["plan_shapes"][start + offset] = size

    def read(self, exchange: Exchange, kind: str) -> BatchPlan:
        """The plan that the last exchange carried; ``kind`` (train, evaluate, …) is part of the signatures."""
        counts = [int(n) for n in exchange.all["plan_micro_batches"].tolist()]
        weights = exchange.all["plan_weights"].tolist()
        shapes = [int(n) for n in exchange.all["plan_shapes"].tolist()]
        numbers = self._form.numbers
        rows = [
            [shapes[slot * numbers : (slot + 1) * numbers] for slot in range(r * self._parts, r * self._parts + count)]
            for r, count in enumerate(counts)
        ]
        mine, start = rows[self._replica], self._replica * self._parts
        return BatchPlan(
            signatures=tuple((kind, *row) for row in mine),
            weights=tuple(weights[start : start + len(mine)]),
            total_weight=sum(weights),
            total_micro_batches=sum(counts),
            ended=tuple(replica for replica, count in enumerate(counts) if not count),
            examples=sum(row[0] for part_rows in rows for row in part_rows if row),
        )
