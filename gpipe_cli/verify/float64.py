"""Layers and data in float64, for gpipe-verify: the same weights and the same examples, only wider."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..data.source import Batch, Source
from ..layers import LayerBuilder


def float64_layers(layers: Sequence[LayerBuilder]) -> list[LayerBuilder]:
    """``layers`` with float64 parameters and buffers; the weights are drawn as ever and then widened."""
    return [replace(layer, build=partial(_build, layer.build)) for layer in layers]


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    return build().double()


class Float64Source:
    """The batches of another source with every floating-point tensor in float64.

    Args:
        source: made from the configuration's own section.
        batch_size: what the section says of it; the source knows it already.
    """

    def __init__(self, source: Source, batch_size: object = None) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return map(_widen, self._source.train(position, M, replica, replicas))

    def evaluation(self, M: int) -> Iterator[Batch]:
        return map(_widen, self._source.evaluation(M))


def _widen(batch: Batch) -> Batch:
    return replace(batch, micro_batches=[(_wide(inputs), _wide(targets)) for inputs, targets in batch.micro_batches])


def _wide(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)
