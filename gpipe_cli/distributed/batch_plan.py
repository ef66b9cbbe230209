"""The plan of a mini-batch: what all workers must know before it begins, written by those who read the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .exchange import Exchange

Part = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # (inputs, targets)


@dataclass(frozen=True)
class Form:
    """How a part is built: the number of dimensions of each input and of each target."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, part: Part) -> Form:
        inputs, targets = part
        return cls(tuple(t.dim() for t in inputs), tuple(t.dim() for t in targets))

    @property
    def numbers(self) -> int:
        """How many integers describe the shapes of one part."""
        return sum(self.inputs) + sum(self.targets)


@dataclass(frozen=True)
class Plan:
    """One mini-batch over all replicas.

    Attributes:
        signatures: of this replica's micro-batches; equal when all shapes are. Empty: nothing to do here.
        weights: of this replica's micro-batches.
        total_weight: of the whole mini-batch, over all replicas.
        total_parts: micro-batches of all replicas; 0: the data of all has ended.
        ended: the replicas whose data has ended. In training the run ends with the first: a mini-batch is that of all.
        examples: of the whole mini-batch.
    """

    signatures: tuple[tuple[object, ...], ...]
    weights: tuple[float, ...]
    total_weight: float
    total_parts: int
    ended: tuple[int, ...]
    examples: int


class PlanCodec:
    """Writes plans into the exchange and reads them from it.

    Args:
        form: of every part of the run.
        parts: the most micro-batches that a mini-batch has in one replica.
        replica, replicas: this one, and how many.
    """

    def __init__(self, form: Form, parts: int, replica: int, replicas: int) -> None:
        self._form, self._parts, self._replica, self._replicas = form, parts, replica, replicas

    def fields(self) -> dict[str, int]:
        """The exchange's fields that this needs."""
        slots = self._replicas * self._parts
        return {"plan_parts": self._replicas, "plan_weights": slots, "plan_shapes": slots * self._form.numbers}

    def write(self, exchange: Exchange, parts: Sequence[Part], weights: Sequence[float]) -> None:
        """Announces this replica's next mini-batch.

        Raises:
            ValueError: its parts are built differently from the first one's.
        """
        first = self._replica * self._parts
        exchange.mine["plan_parts"][self._replica] = len(parts)
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True), start=first):
            if Form.of(part) != self._form:
                raise ValueError(f"the data changed its form: {Form.of(part)} after {self._form}; all parts must agree")
            exchange.mine["plan_weights"][number] = weight
            sizes = [size for tensors in part for tensor in tensors for size in tensor.shape]
            start = number * self._form.numbers
            for offset, size in enumerate(sizes):
                exchange.mine["plan_shapes"][start + offset] = size

    def read(self, exchange: Exchange, kind: str) -> Plan:
        """The plan that the last exchange carried; ``kind`` (train, evaluate, …) is part of the signatures."""
        counts = [int(n) for n in exchange.all["plan_parts"].tolist()]
        weights = exchange.all["plan_weights"].tolist()
        shapes = [int(n) for n in exchange.all["plan_shapes"].tolist()]
        numbers = self._form.numbers
        rows = [
            [shapes[slot * numbers : (slot + 1) * numbers] for slot in range(r * self._parts, r * self._parts + count)]
            for r, count in enumerate(counts)
        ]
        mine, start = rows[self._replica], self._replica * self._parts
        return Plan(
            signatures=tuple((kind, *row) for row in mine),
            weights=tuple(weights[start : start + len(mine)]),
            total_weight=sum(weights),
            total_parts=sum(counts),
            ended=tuple(replica for replica, count in enumerate(counts) if not count),
            examples=sum(row[0] for part_rows in rows for row in part_rows if row),
        )
